"""How a Dask worker becomes one of ours, without processes of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from distributed import Client, Scheduler, Worker

from fusion_dask.worker.plugin import PLUGIN_NAME, FusionWorker, Onboard, fusion_worker


@asynccontextmanager
async def plain_scheduler() -> AsyncIterator[Scheduler]:
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
        yield scheduler


@asynccontextmanager
async def worker_of(scheduler: Scheduler, *preloads: str) -> AsyncIterator[Worker]:
    async with Worker(
        scheduler.address, host="127.0.0.1", nthreads=1, memory_limit=0, preload=list(preloads)
    ) as worker:
        yield worker


def test_a_client_onboards_who_is_not_ours_and_changes_nobody_who_is() -> None:
    async def scenario() -> None:
        async with (
            plain_scheduler() as scheduler,
            worker_of(scheduler) as one,
            worker_of(scheduler) as other,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            ours = FusionWorker()
            await one.plugin_add(ours, name=PLUGIN_NAME)
            await client.register_plugin(Onboard())
            assert fusion_worker(one) is ours
            assert "fusion_pull" in other.handlers
            async with worker_of(scheduler) as late:
                assert fusion_worker(late) is not ours

    asyncio.run(scenario())


def test_without_a_broker_a_worker_works_and_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            plain_scheduler() as scheduler,
            worker_of(scheduler, "fusion_dask.worker") as worker,
        ):
            assert worker.status.name == "running"
            assert fusion_worker(worker).on_teardown is None

    monkeypatch.setenv("FUSION_PROBE_S", "0.1")
    asyncio.run(scenario())
    assert caplog.text.count("has no Fusion broker") == 1


def test_an_echo_is_bounded() -> None:
    async def scenario() -> None:
        plugin = FusionWorker()
        reply = await plugin.echo(b"1234", 3, 0.0)
        assert bytes(reply["data"].data) == bytes(3)
        for size in (-1, 1 << 30):
            with pytest.raises(ValueError, match="echo"):
                await plugin.echo(b"", size, 0.0)

    asyncio.run(scenario())
