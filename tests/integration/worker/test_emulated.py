"""Workers as a provider starts them: pinned, capped, paced, shaped, measured, and let in or not."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, Worker

from fusion_dask.broker.contribution import Load
from fusion_dask.devices.emulation import emulations, parse_shape
from fusion_dask.devices.find import cpu_device
from fusion_dask.devices.share import emulate, share_out
from fusion_dask.errors import StageError
from fusion_dask.graph.programs import dumps_program
from fusion_dask.pipeline.driver import Driver, Programs
from fusion_dask.pipeline.runner import DataSource
from fusion_dask.pipeline.spec import RunSpec, ownership
from fusion_dask.planner.plan import make_plan
from fusion_dask.planner.profile import Profile, profile_from_json
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_storage.checkpoint import latest, read_tensors
from fusion_storage.store import Store, open_store
from support.cluster import ProcessCluster, process_cluster
from support.models import BATCH, CONTEXT, MICROBATCHES, VOCABULARY, tiny_graph
from support.pipelines import RandomTokens

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="affinity and memory caps are Linux's"
)

CAP_BYTES = 400 << 20
SHAPE = parse_shape("100mbit/5ms")
PLAIN, EMULATED = ("w0", "w1"), ("e0", "e1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    cores = sorted(os.sched_getaffinity(0))
    plain = share_out([cpu_device()] * 2, cores=cores, threads=1)
    made = emulations(
        "cpu:0.5,cpu:1", cores=2, available_bytes=int(2 * CAP_BYTES / 0.7) + 2, link=SHAPE
    )
    store = {"FUSION_STORE": str(tmp_path_factory.mktemp("store")), "FUSION_PROBE_S": "0.3"}
    with process_cluster(0) as cluster:
        for name, share in zip(PLAIN, plain, strict=True):
            cluster.add_worker(name, variables=share.as_environment())
        for name, share in zip(EMULATED, emulate(made, cpu_device(), cores=cores), strict=True):
            cluster.add_worker(name, variables={**share.as_environment(), **store})
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ProcessCluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


def members(client: Client) -> dict[str, dict[str, Any]]:
    scheduler: Any = client.scheduler
    status = client.sync(scheduler.fusion_status)
    return {member["name"]: member for member in status["members"]}


def profiles(client: Client, accept: Callable[[Mapping[str, Profile]], bool]) -> dict[str, Profile]:
    """The profiles of the emulated workers, once they are acceptable."""
    deadline = time.monotonic() + 90
    while True:
        plain = {name: members(client)[name]["profile"] for name in EMULATED}
        known = {name: profile_from_json(p) for name, p in plain.items() if p is not None}
        if len(known) == len(EMULATED) and accept(known):
            return known
        assert time.monotonic() < deadline, known
        time.sleep(0.1)


def addresses(client: Client, names: Sequence[str]) -> list[str]:
    return [members(client)[name]["address"] for name in names]


def look(dask_worker: Worker) -> tuple[str, list[list[int]], int, str]:
    """Name, affinity of every thread, kernel threads and device, as the worker's process sees them."""
    from fusion_dask.worker.plugin import fusion_worker

    threads = [int(name) for name in os.listdir("/proc/self/task")]
    device = str(fusion_worker(dask_worker).device)
    affinities = [sorted(os.sched_getaffinity(thread)) for thread in threads]
    return str(dask_worker.name), affinities, torch.get_num_threads(), device


def test_workers_are_pinned_and_share_no_core(client: Client) -> None:
    seen = {name: rest for name, *rest in client.run(look).values()}
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    expected = {"w0": cores[:half], "w1": cores[half : 2 * half], "e0": cores, "e1": cores}
    for name, (affinities, threads, device) in seen.items():
        assert all(affinity == expected[name] for affinity in affinities)
        assert (threads, device) == (1, "cpu")


def test_workers_say_what_they_are_and_are_measured(client: Client) -> None:
    found = profiles(client, lambda known: any("e0" in p.links for p in known.values()))
    known = members(client)
    assert {known[name]["state"] for name in (*PLAIN, *EMULATED)} == {"active"}
    assert all(known[name]["profile"] is None for name in PLAIN)
    for profile in found.values():
        assert profile.emulated == "cpu"
        assert profile.flops_per_s["float32"] > 0
        assert profile.free_memory_bytes <= CAP_BYTES
        assert {"broker", "store"} <= set(profile.links)
        broker = profile.links["broker"]
        # Sleeps may be shorter by the resolution of the clock, never by more.
        assert broker.delay_s > 0.9 * SHAPE.delay_s
        assert broker.send_bytes_per_s < 1.1 * SHAPE.bytes_per_s
        assert broker.receive_bytes_per_s < 1.1 * SHAPE.bytes_per_s
        for name in set(profile.links) & set(EMULATED):
            peer = profile.links[name]
            assert peer.delay_s > 0.9 * SHAPE.delay_s
            assert max(peer.send_bytes_per_s, peer.receive_bytes_per_s) < 1.1 * SHAPE.bytes_per_s


def allocate(size: int) -> int:
    return torch.empty(size, dtype=torch.uint8).nbytes


def test_memory_beyond_the_cap_is_refused_in_that_worker_alone(client: Client) -> None:
    def on(name: str, size: int) -> int:
        workers = addresses(client, [name])
        return int(client.submit(allocate, size, workers=workers, pure=False).result(60))

    assert on("e0", CAP_BYTES // 8) == CAP_BYTES // 8
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        on("e0", 2 * CAP_BYTES)
    assert on("w0", 2 * CAP_BYTES) == 2 * CAP_BYTES
    assert on("e0", CAP_BYTES // 8) == CAP_BYTES // 8


class HungryTokens(RandomTokens):
    """Data that fills the memory of an emulated device."""

    def microbatch(
        self, step: int, microbatch: int, names: Sequence[str]
    ) -> Mapping[str, torch.Tensor]:
        allocate(2 * CAP_BYTES)
        return super().microbatch(step, microbatch, names)


def train(client: Client, store: Store, names: Sequence[str], data: DataSource) -> None:
    """Two segments of a run that is called after its first worker."""
    graph = tiny_graph(0.1)
    _, programs = make_plan(graph, names, stages=2, microbatches=MICROBATCHES)
    order = tuple(p.name for p in graph.parameters)
    spec = RunSpec(
        run=names[0],
        seed=0,
        store=store,
        optimizer=OptimizerConfig(total_steps=4),
        microbatches=MICROBATCHES,
        order=order,
        owned=ownership(programs, order),
        autocast=None,
        data=data,
        timeout_s=60.0,
    )
    packed = Programs(training=tuple(map(dumps_program, programs)))
    where = addresses(client, names)
    load = Load(tokens_per_step=1, flops=(1, 1))
    with Driver(client, spec, packed, where, lambda _: None, load) as driver:
        for start in (0, 2):
            driver.segment(start, start + 2, lambda *_: {})


def tensors(store: Store, run: str) -> dict[str, torch.Tensor]:
    checkpoint = latest(store, run)
    assert checkpoint is not None
    return read_tensors(checkpoint, store, checkpoint.tensor_names)


def fractions(dask_worker: Worker) -> tuple[str, float]:
    from fusion_dask.worker.plugin import fusion_worker

    return str(dask_worker.name), fusion_worker(dask_worker).pace.fraction


def test_emulation_alters_no_bit_and_outlives_a_run(client: Client, tmp_path: Path) -> None:
    profiles(client, lambda _: True)
    store = open_store(tmp_path)
    data = RandomTokens(BATCH, CONTEXT, VOCABULARY)
    train(client, store, PLAIN, data)
    train(client, store, EMULATED, data)
    plain, emulated = tensors(store, "w0"), tensors(store, "e0")
    assert plain.keys() == emulated.keys()
    assert all(torch.equal(emulated[name], tensor) for name, tensor in plain.items())
    assert dict(client.run(fractions).values()) == {"w0": 1.0, "w1": 1.0, "e0": 0.5, "e1": 1.0}
    corrected = profiles(client, lambda known: all(p.efficiency for p in known.values()))
    # Small kernels do not reach the rate of a large product.
    assert all(p.efficiency and p.efficiency < 1.5 for p in corrected.values())


def test_a_stage_that_is_too_large_says_so(client: Client, tmp_path: Path) -> None:
    profiles(client, lambda _: True)
    data = HungryTokens(BATCH, CONTEXT, VOCABULARY)
    with pytest.raises(StageError, match="memory of its worker is full"):
        train(client, open_store(tmp_path), EMULATED, data)


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("late", {"FUSION_CPUS": "4000"}, "FUSION_CPUS=4000"),
        ("later", {"FUSION_PROVIDER": "two words"}, "refused by the broker: provider 'two words'"),
    ],
)
def test_a_worker_that_may_not_join_ends_and_says_why(
    cluster: ProcessCluster, client: Client, name: str, variables: dict[str, str], message: str
) -> None:
    cluster.add_worker(name, variables=variables)
    process = cluster.workers.pop(name)
    assert process.wait(90) != 0
    assert message in cluster.log(name)
    assert name not in members(client)
