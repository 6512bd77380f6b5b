"""`fusion join` before anything is started, and which pool `fusion run` is for."""

import datetime as dt
import io
import time
from pathlib import Path
from typing import Any

import pytest

from fusion_dask.errors import SecurityError
from fusion_dask.security.authority import Authority, make_key_and_csr
from fusion_dask.security.identity import Identity, pool_folder, save
from fusion_dask.security.roles import Role
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.membership import as_member, choose_pool, known_pool, read_token
from fusion_flows.cli.provider import session
from fusion_flows.cli.provider.request import JoinRequest, bytes_of, default_name, window_of
from fusion_flows.cli.startup import Request, wants_embedded
from fusion_flows.cli.table import describe


def member(
    home: Path, host: str, role: Role = Role.USER, *, name: str = "ann", left_s: float = 60.0
) -> Identity:
    """A membership that is kept in `home`; nobody is there to answer it."""
    identity = Identity(
        folder=pool_folder(home, host, 8788, role),
        role=role,
        name=name,
        host=host,
        gateway_port=8788,
        scheduler=f"tls://{host}:8786",
        prefect_url=f"https://{host}:4200/api",
        store="s3://fusion/store",
        own_store=True,
        secrets={"PREFECT_API_AUTH_STRING": "fusion:hidden"},
        expires=time.time() + left_s,
    )
    authority = Authority.open(home / f"authority-{host}")
    key_pem, csr = make_key_and_csr(name)
    issued = authority.sign(csr, role=role, name=name, days=1.0)
    certificates = {"certificate_pem": issued.certificate_pem, "ca_pem": authority.certificate_pem}
    save(identity, key_pem=key_pem, **certificates)
    return identity


def choose(home: Path, **options: Any) -> str | None:
    """The host of the pool that is chosen; only 192.0.2.1 and 192.0.2.2 answer."""
    up = {"192.0.2.1", "192.0.2.2"}
    given = {"cluster": None, "token": None, "environ": {}, **options}
    chosen = choose_pool(home, answers=lambda identity: identity.host in up, **given)
    return None if chosen is None else chosen.host


def test_the_only_pool_that_answers_is_used(tmp_path: Path) -> None:
    assert choose(tmp_path) is None
    member(tmp_path, "192.0.2.9")
    member(tmp_path, "192.0.2.2", Role.PROVIDER)
    assert choose(tmp_path) is None, "one is down, and a provider may not run flows"
    member(tmp_path, "192.0.2.1")
    assert choose(tmp_path) == "192.0.2.1"
    member(tmp_path, "192.0.2.2")
    with pytest.raises(InputError, match=r"192\.0\.2\.1:8788, 192\.0\.2\.2:8788.*--cluster"):
        choose(tmp_path)


def test_an_argument_beats_the_environment_which_beats_the_pool_of_this_home(
    tmp_path: Path,
) -> None:
    member(tmp_path, "192.0.2.1")
    member(tmp_path, "192.0.2.9")
    environ = {"FUSION_CLUSTER": "tcp://192.0.2.5:8786"}
    assert choose(tmp_path, environ=environ) is None
    # A pool that is named is not asked here whether it is up: its scheduler is, later.
    assert choose(tmp_path, environ=environ, cluster="192.0.2.9") == "192.0.2.9"
    assert choose(tmp_path, cluster="tls://192.0.2.1:8786") is None
    with pytest.raises(InputError, match=r"no membership of the pool at 192\.0\.2\.7.*--role user"):
        choose(tmp_path, cluster="192.0.2.7")
    with pytest.raises(InputError, match="name it with --cluster"):
        choose(tmp_path, token="fusion-x")


@pytest.mark.parametrize(
    "options", [{"workers": 2}, {"threads_per_worker": 1}, {"dashboard_port": 1}, {"local": True}]
)
def test_options_for_this_machine_mean_this_machine(options: dict[str, Any]) -> None:
    assert wants_embedded(Request(target="x", **options))
    assert not wants_embedded(Request(target="x"))


def test_a_membership_that_has_ended_is_none(tmp_path: Path) -> None:
    member(tmp_path, "192.0.2.1", left_s=-1.0)
    assert choose(tmp_path) is None
    with pytest.raises(InputError, match="member of no pool; start one"):
        known_pool(tmp_path, None)


def test_a_pool_is_looked_at_in_whatever_role(tmp_path: Path) -> None:
    member(tmp_path, "192.0.2.1", Role.PROVIDER)
    assert known_pool(tmp_path, None).role is Role.PROVIDER
    member(tmp_path, "192.0.2.1")
    assert known_pool(tmp_path, "192.0.2.1").role is Role.USER
    member(tmp_path, "192.0.2.2", Role.PROVIDER)
    with pytest.raises(InputError, match="name one with --cluster"):
        known_pool(tmp_path, None)


def test_a_member_asks_no_proxy_for_its_broker(tmp_path: Path) -> None:
    environment = as_member(member(tmp_path, "192.0.2.1"), {"no_proxy": "intern", "HOME": "/h"})
    assert environment["NO_PROXY"] == environment["no_proxy"] == "intern,192.0.2.1"
    assert environment["FUSION_CLUSTER"] == "tls://192.0.2.1:8786"
    assert environment["HOME"] == "/h"


def test_a_token_may_come_on_standard_input() -> None:
    assert read_token("fusion-x", io.StringIO("other")) == "fusion-x"
    assert read_token(None, io.StringIO("other")) is None
    assert read_token("-", io.StringIO("fusion-y\nmore\n")) == "fusion-y"
    with pytest.raises(InputError, match="standard input is empty"):
        read_token("-", io.StringIO(""))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of `fusion join`; nothing may be started."""
    monkeypatch.setenv("FUSION_HOME", str(tmp_path))
    return tmp_path


def test_joining_again_under_another_name_needs_a_token(home: Path) -> None:
    """The broker goes by the name in the certificate: under another, nothing could be taken back."""
    member(home, "192.0.2.1", Role.PROVIDER, name="attic")
    request = JoinRequest(address="192.0.2.1", name="cellar", emulate="cpu")
    with pytest.raises(InputError, match="joined that pool as attic; leave --name away, or"):
        session.execute(request, None)


@pytest.mark.parametrize("left_s", [None, -1.0])
def test_without_a_valid_membership_a_token_is_asked_for(home: Path, left_s: float | None) -> None:
    if left_s is not None:
        member(home, "192.0.2.1", Role.PROVIDER, left_s=left_s)
    with pytest.raises(InputError, match=r"no member of the pool.*`fusion token new`"):
        session.execute(JoinRequest(address="192.0.2.1", emulate="cpu"), None)


def test_bad_options_come_before_the_membership(home: Path) -> None:
    for request, message in [
        (JoinRequest(address="192.0.2.1", devices="cpu", lend="22-7"), "22:00-07:00"),
        (JoinRequest(address="192.0.2.1", devices="cpu", memory="lots"), "8GB"),
        (JoinRequest(address="192.0.2.1", link="1gbit/1ms"), "--emulate too"),
    ]:
        with pytest.raises(InputError, match=message):
            session.execute(request, "-")
    with pytest.raises(SecurityError, match="not an address"):
        session.execute(JoinRequest(address="a/b", devices="cpu"), None)


@pytest.mark.parametrize("name", ["", "a b", ".hidden", "é", "x" * 61, "a/b"])
def test_names_are_safe_as_file_names(name: str) -> None:
    with pytest.raises(InputError, match="--name"):
        JoinRequest(address="h", name=name)


def test_the_default_name_is_one() -> None:
    assert JoinRequest(address="h", name=default_name()).name


def test_hours_may_cross_midnight() -> None:
    night = window_of(JoinRequest(address="h", lend="22:00-07:00"))
    day = window_of(JoinRequest(address="h", lend=" 9:30 - 17:00 "))
    assert night is not None
    assert day is not None
    at = {hour: dt.time(hour) for hour in (0, 6, 7, 10, 17, 21, 22, 23)}
    assert [h for h, t in at.items() if night.is_open(t)] == [0, 6, 22, 23]
    assert [h for h, t in at.items() if day.is_open(t)] == [10]
    assert night.told(is_open=False) == "not lent until 22:00"
    assert window_of(JoinRequest(address="h")) is None
    for text in ("22:00", "22:00-22:00", "25:00-07:00", "a-b", ""):
        with pytest.raises(InputError, match="--lend"):
            window_of(JoinRequest(address="h", lend=text))


@pytest.mark.parametrize("text", ["", "0GB", "-1GB", "8XB", "GB", "1.GB", "8 GB GB"])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="a size looks like 8GB"):
        bytes_of(text)


def test_what_was_not_measured_is_not_shown() -> None:
    profile = {
        "device": "RTX 3080",
        "emulated": None,
        "flops_per_s": {"float32": 5e11, "bfloat16": 2e12},
        "free_memory_bytes": 9_500_000_000,
        "links": {
            "broker": {"send_bytes_per_s": 12.5e6, "receive_bytes_per_s": 50e6, "delay_s": 0.02}
        },
    }
    shown = describe({"profile": profile, "state": "active"})
    assert shown == ": RTX 3080, 2 TFLOP/s bfloat16, 9.5 GB, 100 Mbit/s, 20.0 ms"
    bare = {**profile, "flops_per_s": {}, "links": {}}
    assert describe({"profile": bare, "state": "backup"}) == ": RTX 3080, 9.5 GB"
    assert describe({"profile": profile, "state": "draining"}) == ""
    assert describe({"profile": None, "state": "active"}) == ""
