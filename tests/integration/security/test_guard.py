"""The door of a real scheduler: what each kind of certificate opens, over real TLS."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from distributed import Client, Scheduler, Worker, rpc
from distributed.security import Security

from fusion_dask.broker import Broker
from fusion_dask.broker.door import Door
from fusion_dask.errors import SecurityError
from fusion_dask.security.authority import Authority, make_key_and_csr
from fusion_dask.security.guard import (
    PROVIDER_AT_SCHEDULER,
    PROVIDER_AT_WORKER,
    WORKER_ONLY,
    guard,
    worker_allows,
)
from fusion_dask.security.roles import Role
from fusion_dask.security.tokens import TokenBook, TokenRecord
from fusion_dask.worker.plugin import FusionWorker

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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
async def worker_of(pool: Pool, security: Security) -> AsyncIterator[Worker]:
    async with Worker(
        pool.address, host="127.0.0.1", nthreads=1, security=security, memory_limit=0
    ) as worker:
        guard(worker, worker_allows)
        yield worker


async def assert_refused(pool: Pool, security: Security, reason: str) -> None:
    """A worker with these credentials does not start, and says why."""
    with pytest.raises(RuntimeError, match="failed to start") as caught:
        async with worker_of(pool, security):
            pass
    assert reason in str(caught.value.__cause__)


def add(a: int, b: int) -> int:
    return a + b


def test_a_user_submits_and_a_provider_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, _ = pool.member(Role.PROVIDER, "box")
        user, _ = pool.member(Role.USER, "ann")
        async with scheduler_of(pool), worker_of(pool, provider) as worker:
            async with Client(pool.address, security=user, asynchronous=True) as client:
                assert await client.submit(add, 1, 2, workers=[worker.address]) == 3
                assert await client.run(add, 1, 2) == {worker.address: 3}
            with pytest.raises(ImportError, match=r"role provider does not allow register-client"):
                await Client(pool.address, security=provider, asynchronous=True)
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
        async with scheduler_of(pool):
            stranger_here = Security(
                require_encryption=True,
                tls_ca_file=str(pool.folder / "authority" / "ca.pem"),
                tls_client_cert=str(other.folder / "eve.pem"),
                tls_client_key=str(other.folder / "eve.key"),
            )
            for security in (stranger, stranger_here):
                with pytest.raises(OSError, match=r"(?i)tls|ssl|certificate|timed out|closed"):
                    await Client(pool.address, security=security, asynchronous=True, timeout="2 s")
            plain = pool.address.replace("tls://", "tcp://")
            with pytest.raises(OSError, match=r"(?i)timed out|closed"):
                await Client(plain, asynchronous=True, timeout="2 s")

    asyncio.run(scenario())


def test_a_revoked_member_is_sent_away_and_stays_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, provider_token = pool.member(Role.PROVIDER, "box")
        user, user_token = pool.member(Role.USER, "ann")
        async with scheduler_of(pool) as scheduler, worker_of(pool, provider):
            client = await Client(pool.address, security=user, asynchronous=True)
            assert len(scheduler.workers) == 1
            for token in (provider_token, user_token):
                pool.book.revoke(token, now=time.time())
            deadline = time.monotonic() + 20
            while scheduler.workers or client.id in scheduler.clients:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await assert_refused(pool, provider, "was revoked")
            with pytest.raises((ImportError, SecurityError), match="was revoked"):
                await Client(pool.address, security=user, asynchronous=True)

    asyncio.run(scenario())


def test_every_operation_that_is_named_exists(tmp_path: Path) -> None:
    """A new Dask that renames one must fail here, not lock workers out in the field."""

    async def scenario() -> None:
        pool = make_pool(tmp_path)
        provider, _ = pool.member(Role.PROVIDER, "box")
        async with scheduler_of(pool) as scheduler, worker_of(pool, provider) as worker:
            await worker.plugin_add(FusionWorker(), name=FusionWorker.name)
            assert set(scheduler.handlers) >= PROVIDER_AT_SCHEDULER | WORKER_ONLY
            assert set(worker.handlers) >= PROVIDER_AT_WORKER

    asyncio.run(scenario())
