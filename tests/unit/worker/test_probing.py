"""When a worker is measured: with a worker, a broker and a probe of the test's own."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from distributed import Worker

from fusion_dask.worker import links, probing
from fusion_dask.worker.plugin import FusionWorker
from fusion_dask.worker.probe import Rates
from fusion_dask.worker.probing import Probing
from fusion_dask.worker.settings import WorkerSettings

RATES = Rates(
    flops_per_s={"float32": 1e9},
    memory_bytes_per_s=1e9,
    host_to_device_bytes_per_s=None,
    device_to_host_bytes_per_s=None,
)


class Broker:
    """What the scheduler is for a worker."""

    def __init__(self) -> None:
        self.profiles: list[Mapping[str, Any]] = []
        self.faults: list[Exception] = []

    async def fusion_status(self) -> dict[str, Any]:
        if self.faults:
            raise self.faults.pop()
        return {"members": [{"name": "peer", "address": "there", "state": "active"}]}

    async def fusion_profile(self, *, address: str, profile: Mapping[str, Any]) -> None:
        assert address == "here"
        self.profiles.append(profile)

    async def fusion_echo(self, *, data: object, reply_bytes: int) -> dict[str, Any]:
        del data
        return {"data": bytes(reply_bytes)}


class Peer:
    """A neighbour whose program is broken."""

    async def fusion_echo(self, **message: object) -> None:
        raise LookupError(sorted(message))


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def worker(broker: Broker, tmp_path: Path) -> Worker:
    fake = SimpleNamespace(
        address="here",
        name="w",
        scheduler=broker,
        rpc=lambda _: Peer(),
        status=SimpleNamespace(name="running"),
        state=SimpleNamespace(executing=set()),
        local_directory=str(tmp_path / "w"),
    )
    return cast("Worker", fake)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> FusionWorker:
    monkeypatch.delenv("FUSION_STORE", raising=False)
    monkeypatch.setattr(probing, "RETRY_S", 0.01)
    monkeypatch.setattr(probing, "measure_disk", lambda _: None)
    monkeypatch.setattr(links, "FIRST_BYTES", 64)
    monkeypatch.setattr(links, "LARGEST_BYTES", 64)
    return FusionWorker(device=torch.device("cpu"))


async def until_reported(
    worker: Worker, plugin: FusionWorker, broker: Broker, act: Callable[[], None]
) -> None:
    """Probe until the broker has a profile, acting whenever the loop has time."""
    driver = Probing(worker, plugin, WorkerSettings.from_environ({}))
    driver.start()
    deadline = time.monotonic() + 60
    try:
        while not broker.profiles:
            assert time.monotonic() < deadline
            act()
            await asyncio.sleep(0.01)
    finally:
        await driver.close()


def test_a_stage_that_came_while_others_were_measured_goes_first(
    worker: Worker, plugin: FusionWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[Path] = []
    residents: list[object] = []

    @contextlib.contextmanager
    def turn(path: Path, ended: object) -> Iterator[None]:
        del ended
        if not turns:
            plugin.resident = "a stage"
        yield
        turns.append(path)

    def measure_rates(device: torch.device, **options: object) -> Rates:
        del device, options
        residents.append(plugin.resident)
        return RATES

    def release() -> None:
        if turns:
            plugin.resident = None

    monkeypatch.setattr(probing, "turn", turn)
    monkeypatch.setattr(probing, "measure_rates", measure_rates)
    asyncio.run(until_reported(worker, plugin, broker, release))
    assert len(turns) == 2
    assert residents == [None]


def test_a_fault_of_the_broker_or_of_a_peer_ends_no_probing(
    worker: Worker, plugin: FusionWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.faults.append(LookupError("once"))
    monkeypatch.setattr(probing, "REPEAT_S", 0.01)
    monkeypatch.setattr(probing, "measure_rates", lambda _, **__: RATES)
    asyncio.run(until_reported(worker, plugin, broker, lambda: None))
    assert not broker.faults
    assert set(broker.profiles[0]["links"]) == {"broker"}
