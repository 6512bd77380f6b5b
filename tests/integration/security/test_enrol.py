"""Enrolment over real TLS on the loopback: who gets a certificate, and who learns a secret."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from fusion_dask.errors import EnrolmentError, SecurityError, TokenRefused, VersionMismatch
from fusion_dask.security.authority import Authority
from fusion_dask.security.enrol import ask_health, enrol
from fusion_dask.security.gateway import BODY_BYTES, create_app
from fusion_dask.security.roles import Role
from fusion_dask.security.state import BrokerState, Ports
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


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Gateway]:
    authority = Authority.open(folder / "authority")
    certificate, key = authority.server_files(folder, ["127.0.0.1"])
    book = TokenBook(folder / "tokens.json")
    state = BrokerState(
        host="127.0.0.1",
        addresses=("127.0.0.1",),
        ports=Ports(gateway=1, scheduler=2, prefect=3, store=4, dashboard=5),
        store="s3://fusion/store",
        secrets={"PREFECT_API_AUTH_STRING": HUSH},
    )
    app = create_app(authority, book, state)
    bodies: list[bytes] = []
    heard_paths: list[str] = []

    async def heard(scope: Scope, receive: Receive, send: Send) -> None:
        heard_paths.append(scope.get("path", ""))

        async def listen() -> Message:
            message = await receive()
            bodies.append(message.get("body", b""))
            return message

        await app(scope, listen, send)

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        heard, ssl_certfile=certificate, ssl_keyfile=key, log_level="critical", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Gateway(
            port=listener.getsockname()[1],
            authority=authority,
            book=book,
            bodies=bodies,
            paths=heard_paths,
        )
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


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


def test_a_long_request_and_garbage_end_at_the_door(gateway: Gateway) -> None:
    status, _ = ask(gateway, "POST", "/enrol", b"x" * (BODY_BYTES + 1))
    assert status == 413
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw:
        raw.sendall(b"GET /ca HTTP/1.1\r\n\r\n")
        assert b"200" not in raw.recv(1000)
    assert ask(gateway, "GET", "/tokens.json")[0] == 404
    assert ask(gateway, "GET", "/health")[0] == 200
