"""Enrolment over real TLS on the loopback: who gets a certificate, and who learns a secret."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fusion_dask.errors import EnrolmentError, SecurityError, TokenRefused, VersionMismatch
from fusion_dask.security.authority import Authority, make_key_and_csr
from fusion_dask.security.enrol import ask_health, enrol
from fusion_dask.security.gateway import BODY_BYTES, create_app
from fusion_dask.security.roles import Role
from fusion_dask.security.state import BrokerState, Ports, save_state
from fusion_dask.security.tokens import Token, TokenBook
from fusion_dask.security.versions import versions

HUSH = "fusion:hush"


@dataclass
class Gateway:
    """A gateway that listens."""

    port: int
    authority: Authority
    book: TokenBook
    bodies: list[bytes]
    paths: list[str]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def token(self, *, uses: int | None = None, expires_s: float | None = 60.0) -> Token:
        return self.book.new(
            role=Role.PROVIDER,
            fingerprint=self.authority.fingerprint,
            expires_s=expires_s,
            uses=uses,
            label="",
            now=time.time(),
        )


def state_on(port: int) -> BrokerState:
    return BrokerState(
        host="127.0.0.1",
        addresses=("127.0.0.1",),
        ports=Ports(gateway=port, scheduler=2, prefect=3, store=4, dashboard=5),
        store="s3://fusion/store",
        secrets={"PREFECT_API_AUTH_STRING": HUSH},
    )


@contextlib.contextmanager
def listening(folder: Path, authority: Authority, app: ASGIApp) -> Iterator[int]:
    """The port on which an application is served with a certificate of the authority."""
    certificate, key = authority.server_files(folder, ["127.0.0.1"])
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, ssl_certfile=certificate, ssl_keyfile=key, log_level="critical", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Gateway]:
    authority = Authority.open(folder / "authority")
    book = TokenBook(folder / "tokens.json")
    app = create_app(authority, book, state_on(1))
    bodies: list[bytes] = []
    heard_paths: list[str] = []

    async def heard(scope: Scope, receive: Receive, send: Send) -> None:
        heard_paths.append(scope.get("path", ""))

        async def listen() -> Message:
            message = await receive()
            bodies.append(message.get("body", b""))
            return message

        await app(scope, listen, send)

    with listening(folder, authority, heard) as port:
        yield Gateway(port=port, authority=authority, book=book, bodies=bodies, paths=heard_paths)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def test_a_token_becomes_a_membership(gateway: Gateway, tmp_path: Path) -> None:
    identity = enrol(gateway.address, str(gateway.token()), name="box", home=tmp_path)
    assert (identity.role, identity.name) == (Role.PROVIDER, "box")
    assert identity.scheduler == "tls://127.0.0.1:2"
    assert identity.secrets["PREFECT_API_AUTH_STRING"] == HUSH
    assert identity.secrets["AWS_ENDPOINT_URL"] == "https://127.0.0.1:4"
    context = ssl.create_default_context(cafile=str(identity.ca))
    context.load_cert_chain(identity.certificate, identity.key)
    health, behind_s = ask_health(identity)
    assert health["versions"]["fusion-dask"]
    assert abs(behind_s) < 5


def test_tokens_that_are_not_valid_are_refused_with_the_reason(
    gateway: Gateway, tmp_path: Path
) -> None:
    good = gateway.token()
    wrong = replace(good, secret=bytes(20))
    with pytest.raises(TokenRefused, match="did not make"):
        enrol(gateway.address, str(wrong), name="box", home=tmp_path)
    expired = gateway.token(expires_s=-1.0)
    with pytest.raises(TokenRefused, match="has expired"):
        enrol(gateway.address, str(expired), name="box", home=tmp_path)
    gateway.book.revoke(good.id, now=time.time())
    with pytest.raises(TokenRefused, match="was revoked"):
        enrol(gateway.address, str(good), name="box", home=tmp_path)
    with pytest.raises(SecurityError, match="not a token"):
        enrol(gateway.address, "hello", name="box", home=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_token_for_one_is_not_replayed(gateway: Gateway, tmp_path: Path) -> None:
    once = str(gateway.token(uses=1))
    enrol(gateway.address, once, name="box", home=tmp_path / "a")
    with pytest.raises(TokenRefused, match="as often as it may be"):
        enrol(gateway.address, once, name="box", home=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_broker_that_did_not_make_the_token_never_hears_its_secret(
    gateway: Gateway, tmp_path: Path
) -> None:
    with serving(tmp_path / "impostor") as impostor:
        token = gateway.token()
        with pytest.raises(EnrolmentError, match="not the broker that made this token"):
            enrol(impostor.address, str(token), name="box", home=tmp_path / "home")
        assert impostor.paths == ["/ca"]
        secret = str(token).split("-")[2].encode()
        assert not any(secret in body for body in impostor.bodies)
    enrol(gateway.address, str(token), name="box", home=tmp_path / "home")
    assert any(secret in body for body in gateway.bodies), "the test would have seen it"


def test_nobody_and_plain_text_are_told_apart(gateway: Gateway, tmp_path: Path) -> None:
    token = str(gateway.token())
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    with pytest.raises(EnrolmentError, match="is `fusion up` running"):
        enrol(f"127.0.0.1:{free}", token, name="box", home=tmp_path, timeout_s=2.0)
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            connection, _ = plain.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EnrolmentError, match="does not speak TLS"):
            enrol(f"127.0.0.1:{plain.getsockname()[1]}", token, name="box", home=tmp_path)
        thread.join(10)


def test_an_address_that_the_certificate_does_not_name_is_explained(
    gateway: Gateway, tmp_path: Path
) -> None:
    with pytest.raises(EnrolmentError, match="fusion up --address"):
        enrol(f"localhost:{gateway.port}", str(gateway.token()), name="box", home=tmp_path)


def test_another_version_is_refused_with_the_line_that_fixes_it(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = versions()
    monkeypatch.setattr(
        "fusion_dask.security.enrol.versions", lambda: {**real, "distributed": "2000.1.0"}
    )
    token = gateway.token(uses=1)
    with pytest.raises(VersionMismatch, match='pip install "distributed=='):
        enrol(gateway.address, str(token), name="box", home=tmp_path)
    assert gateway.book.check(token, now=time.time()).used == 0


def ask(gateway: Gateway, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    context = ssl.create_default_context(cadata=gateway.authority.certificate_pem.decode())
    connection = http.client.HTTPSConnection("127.0.0.1", gateway.port, context=context, timeout=10)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 5000,
        b"[]",
        b'{"token": 1}',
        json.dumps({"token": "x", "csr": "y", "name": "", "versions": {}}).encode(),
        b"\x00\xff" * 100,
    ],
)
def test_requests_that_are_none_are_refused_and_the_gateway_stays_up(
    gateway: Gateway, body: bytes
) -> None:
    status, answer = ask(gateway, "POST", "/enrol", body)
    assert status in {400, 409}
    assert json.loads(answer)["message"]
    assert ask(gateway, "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("name", "", "a name has"),
        ("name", "../box", "a name has"),
        ("name", ".box", "a name has"),
        ("name", "x" * 101, "a name has"),
        ("name", "é" * 100, "a name has"),
        ("name", "box\n2030 INFO root joined", "a name has"),
        ("versions", {"torch": 5}, "not a version"),
        ("versions", {"torch": "2\n2030 INFO root joined"}, "not a version"),
        ("versions", {"python": "9" * 50_000}, "not a version"),
        ("csr", "\ud800", "PEM"),
        ("csr", "", "cannot be read"),
        ("token", "\ud800", "not a token"),
    ],
)
def test_fields_that_are_malformed_are_refused_and_cost_no_use(
    gateway: Gateway, field: str, value: object, reason: str
) -> None:
    token = gateway.token(uses=1)
    _, csr = make_key_and_csr("box")
    request = {"token": str(token), "csr": csr.decode(), "name": "box", "versions": versions()}
    body = json.dumps({**request, field: value}).encode()
    status, answer = ask(gateway, "POST", "/enrol", body)
    assert (status, json.loads(answer)["error"]) == (400, "request")
    assert reason in json.loads(answer)["message"]
    assert gateway.book.check(token, now=time.time()).used == 0
    assert ask(gateway, "POST", "/enrol", json.dumps(request).encode())[0] == 200


def test_a_request_that_does_not_arrive_is_given_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion_dask.security.gateway.BODY_S", 0.05)
    context = ssl.create_default_context(cadata=gateway.authority.certificate_pem.decode())
    with (
        socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"POST /enrol HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_stranger_does_not_fill_the_memory_of_a_joiner(gateway: Gateway, tmp_path: Path) -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(OSError):
            for _ in range(1000):
                part = {"type": "http.response.body", "body": b"x" * 65536, "more_body": True}
                await send(part)
        served.append(scope["path"])

    served: list[str] = []
    token = str(gateway.token())
    with (
        listening(tmp_path, gateway.authority, endless) as port,
        pytest.raises(EnrolmentError, match="answers more than"),
    ):
        enrol(f"127.0.0.1:{port}", token, name="box", home=tmp_path / "home")
    assert served == ["/ca"]


@contextlib.contextmanager
def process_of(folder: Path) -> Iterator[tuple[Gateway, Path]]:
    """The gateway as `fusion up` runs it, and its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    authority = Authority.open(folder / "authority")
    book = TokenBook(folder / "tokens.json")
    save_state(folder, state_on(port))
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fusion_dask.security.gateway", str(folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    gateway = Gateway(port=port, authority=authority, book=book, bodies=[], paths=[])
    try:
        deadline = time.monotonic() + 60
        while not answers(gateway):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield gateway, log
    finally:
        process.terminate()
        process.wait(30)


def answers(gateway: Gateway) -> bool:
    try:
        return ask(gateway, "GET", "/health")[0] == 200
    except OSError:
        return False


def test_the_process_keeps_secrets_out_of_its_log_and_ends_long_headers(tmp_path: Path) -> None:
    with process_of(tmp_path) as (gateway, log):
        good, gone = gateway.token(), gateway.token()
        identity = enrol(gateway.address, str(good), name="box", home=tmp_path / "home")
        gateway.book.revoke(gone.id, now=time.time())
        with pytest.raises(TokenRefused, match="was revoked"):
            enrol(gateway.address, str(gone), name="box", home=tmp_path / "home")
        context = ssl.create_default_context(cafile=str(identity.ca))
        with (
            socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /ca HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 40_000)
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        assert answers(gateway)
        written = log.read_text()
    assert f"provider 'box' joined with token {good.id}" in written
    assert f"token {gone.id} was revoked" in written
    for secret in (HUSH, *(str(token).split("-")[2] for token in (good, gone))):
        assert secret not in written
    assert "PRIVATE KEY" not in written


def test_a_long_request_and_garbage_end_at_the_door(gateway: Gateway) -> None:
    status, _ = ask(gateway, "POST", "/enrol", b"x" * (BODY_BYTES + 1))
    assert status == 413
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw:
        raw.sendall(b"GET /ca HTTP/1.1\r\n\r\n")
        assert b"200" not in raw.recv(1000)
    assert ask(gateway, "GET", "/tokens.json")[0] == 404
    assert ask(gateway, "GET", "/health")[0] == 200
