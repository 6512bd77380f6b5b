"""The door of a real scheduler: what each kind of certificate opens, over real TLS."""

import asyncio
import inspect
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from distributed import Client, Scheduler, Worker, rpc
from distributed.core import Server
from distributed.security import Security

from fusion_dask.broker import Broker
from fusion_dask.broker.door import Door
from fusion_dask.errors import SecurityError
from fusion_dask.security.authority import Authority, make_key_and_csr
from fusion_dask.security.guard import (
    PROVIDER_AT_SCHEDULER,
    PROVIDER_AT_WORKER,
    WORKER_ONLY,
    Refused,
    guard,
    worker_allows,
)
from fusion_dask.security.roles import Role
from fusion_dask.security.tokens import TokenBook, TokenRecord


@dataclass
class Pool:
    folder: Path
    authority: Authority
    book: TokenBook
    address: str = ""

    def member(self, role: Role, name: str) -> tuple[Security, str]:
        """Credentials of a new member, and the id of its token."""
        token = self.book.new(
            role=role,
            fingerprint=self.authority.fingerprint,
            expires_s=None,
            uses=None,
            label="",
            now=time.time(),
        )
        key_pem, csr = make_key_and_csr(name)
        files = {part: self.folder / f"{name}.{part}" for part in ("key", "pem")}

        def issue(record: TokenRecord) -> str:
            issued = self.authority.sign(csr, role=record.role, name=name, days=1.0)
            files["pem"].write_bytes(issued.certificate_pem)
            return issued.serial

        self.book.redeem(token, issue, now=time.time())
        files["key"].write_bytes(key_pem)
        return self.security(files["pem"], files["key"]), token.id

    def security(self, certificate: Path, key: Path) -> Security:
        pair = {
            f"tls_{part}_{kind}": str(path)
            for part in ("client", "worker", "scheduler")
            for kind, path in (("cert", certificate), ("key", key))
        }
        ca = self.folder / "authority" / "ca.pem"
        return Security(require_encryption=True, tls_ca_file=str(ca), **pair)


def make_pool(folder: Path) -> Pool:
    folder.mkdir(exist_ok=True)
    book = TokenBook(folder / "tokens.json")
    return Pool(folder=folder, authority=Authority.open(folder / "authority"), book=book)


@asynccontextmanager
async def scheduler_of(pool: Pool) -> AsyncIterator[Scheduler]:
    files = pool.authority.server_files(pool.folder, ["127.0.0.1"])
    scheduler = Scheduler(
        host="127.0.0.1",
        port=0,
        protocol="tls",
        security=pool.security(*files),
        dashboard_address="127.0.0.1:0",
    )
    for plugin in (Broker(), Door(pool.folder / "tokens.json")):
        scheduler.add_plugin(plugin, name=plugin.name)
    async with scheduler:
        pool.address = scheduler.address
        yield scheduler


@asynccontextmanager
async def worker_of(
    pool: Pool,
    security: Security,
    allows: Callable[[Role | None, str], bool] = worker_allows,
) -> AsyncIterator[Worker]:
    async with Worker(
        pool.address, host="127.0.0.1", nthreads=1, security=security, memory_limit=0
    ) as worker:
        guard(worker, allows)
        yield worker


async def assert_refused(pool: Pool, security: Security, reason: str) -> None:
    """A worker with these credentials does not start, and says why."""
    with pytest.raises(RuntimeError, match="failed to start") as caught:
        async with worker_of(pool, security):
            pass
    assert reason in str(caught.value.__cause__)


def add(a: int, b: int) -> int:
    return a + b


async def greeting(pool: Pool, certificate: str | None) -> bytes:
    """The first byte of what the scheduler says to a peer with or without a certificate."""
    context = ssl.create_default_context(cafile=str(pool.folder / "authority" / "ca.pem"))
    if certificate is not None:
        context.load_cert_chain(
            pool.folder / f"{certificate}.pem", pool.folder / f"{certificate}.key"
        )
    host, port = pool.address.removeprefix("tls://").split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except (ssl.SSLError, ConnectionError):
        return b""
    try:
        return await asyncio.wait_for(reader.read(1), 20)
    except (ssl.SSLError, ConnectionError):
        return b""
    finally:
        writer.transport.abort()


def is_closed(client: Client) -> bool:
    return str(client.status) == "closed"


def test_a_user_submits_and_a_provider_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, _ = pool.member(Role.PROVIDER, "box")
        user, _ = pool.member(Role.USER, "ann")
        async with scheduler_of(pool) as scheduler, worker_of(pool, provider) as worker:
            async with Client(pool.address, security=user, asynchronous=True) as client:
                assert await client.submit(add, 1, 2, workers=[worker.address]) == 3
                assert await client.run(add, 1, 2) == {worker.address: 3}
                assert await client.run_on_scheduler(add, 1, 2) == 3
            with pytest.raises(ImportError, match=r"role provider does not allow register-client"):
                await Client(pool.address, security=provider, asynchronous=True)
            assert not set(scheduler.clients) - {"fire-and-forget"}
            async with rpc(
                pool.address, connection_args=provider.get_connection_args("client")
            ) as s:
                assert (await s.fusion_status())["members"] == ()
                for operation in ("run_function", "register_scheduler_plugin", "broadcast"):
                    with pytest.raises(SecurityError, match="refused"):
                        await getattr(s, operation)()
            arguments = provider.get_connection_args("client")
            async with rpc(worker.address, connection_args=arguments) as neighbour:
                assert (await neighbour.identity())["type"] == "Worker"
                for operation in ("run", "update_data", "upload_file", "actor_execute"):
                    with pytest.raises(SecurityError, match="refused"):
                        await getattr(neighbour, operation)()
                await assert_refused(pool, user, "role user does not allow register-worker")

    asyncio.run(scenario())


def test_strangers_do_not_get_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = make_pool(tmp_path / "pool")
        other = make_pool(tmp_path / "other")
        stranger, _ = other.member(Role.USER, "eve")
        async with scheduler_of(pool) as scheduler:
            stranger_here = Security(
                require_encryption=True,
                tls_ca_file=str(pool.folder / "authority" / "ca.pem"),
                tls_client_cert=str(other.folder / "eve.pem"),
                tls_client_key=str(other.folder / "eve.key"),
            )
            for security, reason in (
                (stranger, "TLS certificate does not match"),
                (stranger_here, r"(?i)unknown.ca"),
            ):
                with pytest.raises(OSError, match=reason):
                    await Client(pool.address, security=security, asynchronous=True, timeout="2 s")
            plain = pool.address.replace("tls://", "tcp://")
            with pytest.raises(OSError, match=r"(?i)reset|closed|timed out"):
                await Client(plain, asynchronous=True, timeout="2 s")
            assert await greeting(pool, certificate=None) == b""
            pool.member(Role.USER, "ann")
            assert await greeting(pool, certificate="ann"), "with a certificate it is heard"
            assert not set(scheduler.clients) - {"fire-and-forget"}

    asyncio.run(scenario())


def test_a_revoked_member_is_sent_away_and_stays_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, provider_token = pool.member(Role.PROVIDER, "box")
        user, user_token = pool.member(Role.USER, "ann")
        async with scheduler_of(pool) as scheduler, worker_of(pool, provider):
            async with Client(pool.address, security=user, asynchronous=True) as client:
                assert len(scheduler.workers) == 1
                for token in (provider_token, user_token):
                    pool.book.revoke(token, now=time.time())
                deadline = time.monotonic() + 20
                while scheduler.workers or client.id in scheduler.clients or not is_closed(client):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)
            await assert_refused(pool, provider, "was revoked")
            with pytest.raises(SecurityError, match="was revoked"):
                await Client(pool.address, security=user, asynchronous=True)

    asyncio.run(scenario())


def test_a_book_that_is_damaged_for_a_while_ends_no_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, token = pool.member(Role.PROVIDER, "box")
        other, later = pool.member(Role.PROVIDER, "bag")
        path = pool.folder / "tokens.json"
        async with scheduler_of(pool) as scheduler, worker_of(pool, other):
            async with worker_of(pool, provider):
                pool.book.revoke(token, now=time.time())
                await until(lambda: len(scheduler.workers) == 1)
            kept = path.read_bytes()
            path.write_text("{")
            await until(lambda: "the token book cannot be read" in caplog.text)
            path.unlink()
            await assert_refused(pool, provider, "was revoked")
            path.write_bytes(kept)
            pool.book.revoke(later, now=time.time())
            await until(lambda: not scheduler.workers)

    asyncio.run(scenario())


def test_neighbours_and_users_fetch_results_from_workers(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = make_pool(tmp_path)
        first, _ = pool.member(Role.PROVIDER, "box")
        second, _ = pool.member(Role.PROVIDER, "bag")
        user, _ = pool.member(Role.USER, "ann")
        asked = set()

        def watch(role: Role | None, operation: str) -> bool:
            asked.add((role, operation))
            return worker_allows(role, operation)

        async with (
            scheduler_of(pool),
            worker_of(pool, first, watch) as here,
            worker_of(pool, second, watch) as there,
            Client(pool.address, security=user, asynchronous=True) as client,
        ):
            three = client.submit(add, 1, 2, workers=[here.address])
            seven = client.submit(add, three, 4, workers=[there.address])
            assert await client.gather([three, seven], direct=True) == [3, 7]
        assert asked >= {(Role.PROVIDER, "get_data"), (Role.USER, "get_data")}

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "inproc://"])
def test_a_cluster_without_tls_is_left_alone(address: str) -> None:
    async def scenario() -> None:
        asked = []

        def never(role: Role | None, operation: str) -> bool:
            asked.append((role, operation))
            return False

        async with Server({"add": add}) as server:
            guard(server, never)
            await server.listen(address)
            async with rpc(server.address) as caller:
                assert await caller.add(a=1, b=2) == 3
        assert not asked

    asyncio.run(scenario())


def test_an_operation_that_is_added_or_replaced_later_is_guarded(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, _ = pool.member(Role.PROVIDER, "box")
        files = pool.authority.server_files(pool.folder, ["127.0.0.1"])
        arguments = provider.get_connection_args("client")
        async with Server({"sum": add}) as server:
            guard(server, lambda role, operation: role is Role.PROVIDER and operation == "sum")
            listen = pool.security(*files).get_listen_args("scheduler")
            await server.listen("tls://127.0.0.1", **listen)
            async with rpc(server.address, connection_args=arguments) as caller:
                assert await caller.sum(a=1, b=2) == 3
                server.handlers["sum"] = lambda a, b: a * b
                assert await caller.sum(a=1, b=2) == 2
                server.handlers["later"] = add
                with pytest.raises(Refused, match="role provider does not allow later"):
                    await caller.later(a=1, b=2)

    asyncio.run(scenario())


def test_every_operation_that_is_named_exists(tmp_path: Path) -> None:
    """A new Dask that renames one must fail here, not lock workers out in the field."""

    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, _ = pool.member(Role.PROVIDER, "box")
        async with scheduler_of(pool) as scheduler, worker_of(pool, provider) as worker:
            assert set(scheduler.handlers) >= PROVIDER_AT_SCHEDULER | WORKER_ONLY
            # Handlers of ours come with our plugin, and no new Dask renames them.
            named = {name for name in PROVIDER_AT_WORKER if not name.startswith("fusion_")}
            assert set(worker.handlers) >= named

    asyncio.run(scenario())


def test_the_stream_of_a_worker_takes_no_operation_of_a_client(tmp_path: Path) -> None:
    """Both kinds share one table; what keeps them apart is the `worker=` that Dask adds."""

    async def scenario() -> None:
        async with scheduler_of(make_pool(tmp_path)) as scheduler:
            signatures = {
                name: inspect.signature(handler).parameters
                for name, handler in scheduler.stream_handlers.items()
            }
            for_clients = {name: of for name, of in signatures.items() if "client" in of}
            assert for_clients.keys() >= {"update-graph", "update-data", "cancel-keys"}
            for name, of in for_clients.items():
                assert "worker" not in of, name
                assert not any(one.kind is one.VAR_KEYWORD for one in of.values()), name

    asyncio.run(scenario())
