"""The engine on real Dask workers: equal to one process, resumed bit for bit, never hanging."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client

from fusion_dask.broker.contribution import Load
from fusion_dask.errors import NeighbourFailed, StageError, StageLost
from fusion_dask.graph.programs import dumps_program
from fusion_dask.pipeline.driver import Driver, Programs
from fusion_dask.pipeline.pool import workers_of
from fusion_dask.pipeline.spec import RunSpec, StepMeasure, ownership
from fusion_dask.planner.plan import make_plan
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_storage.checkpoint import latest, read_tensors
from fusion_storage.store import Store, open_store
from fusion_tasks.models import initialise_model
from support.cluster import ProcessCluster, process_cluster
from support.models import BATCH, CONTEXT, MICROBATCHES, VOCABULARY, tiny_gpt, tiny_graph
from support.pipelines import RandomTokens, train_plain

OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=50, clip_norm=0.5)
DATA = RandomTokens(BATCH, CONTEXT, VOCABULARY)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with process_cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ProcessCluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def _run(store: Store, run: str, stages: int, **changes: Any) -> tuple[RunSpec, Programs]:
    graph = tiny_graph()
    names = [f"w{i}" for i in range(stages)]
    _, programs = make_plan(graph, names, stages=stages, microbatches=MICROBATCHES)
    order = tuple(p.name for p in graph.parameters)
    spec = RunSpec(
        run=run,
        seed=0,
        store=store,
        optimizer=OPTIMIZER,
        microbatches=MICROBATCHES,
        order=order,
        owned=ownership(programs, order),
        autocast=None,
        data=DATA,
        timeout_s=60.0,
    )
    return replace(spec, **changes), Programs(training=tuple(map(dumps_program, programs)))


LOAD = Load(tokens_per_step=1, flops=(1, 1, 1))


def _ignore(measure: StepMeasure) -> None:
    """Steps are not looked at."""


def _train(
    client: Client,
    store: Store,
    run: str,
    stages: int,
    segments: list[int],
    on_step: Callable[[StepMeasure], None] = _ignore,
) -> list[StepMeasure]:
    spec, programs = _run(store, run, stages)
    addresses = list(workers_of(client).values())[:stages]
    measures: list[StepMeasure] = []
    last = latest(store, run)
    start = 0 if last is None else last.step
    with Driver(client, spec, programs, addresses, on_step, LOAD) as driver:
        for stop in segments:
            measures += driver.segment(start, stop, lambda *_: {}).steps
            start = stop
    return measures


def _tensors(store: Store, run: str) -> dict[str, torch.Tensor]:
    checkpoint = latest(store, run)
    assert checkpoint is not None
    return read_tensors(checkpoint, store, checkpoint.tensor_names)


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(other[n], t) for n, t in one.items())


def test_three_workers_equal_the_plain_loop(client: Client, store: Store) -> None:
    torch.set_num_threads(1)
    plain = train_plain(
        initialise_model(tiny_gpt(), tiny_graph(), 0),
        DATA,
        steps=12,
        microbatches=MICROBATCHES,
        optimizer=OPTIMIZER,
    )
    told: list[StepMeasure] = []

    measures = _train(client, store, "equal", 3, [6, 12], told.append)

    assert [m.loss for m in measures] == pytest.approx(plain.losses, rel=1e-5)
    assert [m.step for m in measures] == list(range(12))
    deadline = time.monotonic() + 10
    while len(told) < 12 and time.monotonic() < deadline:  # the last event may follow the result
        time.sleep(0.01)
    assert [(m.step, m.loss) for m in told] == [(m.step, m.loss) for m in measures]
    tensors = _tensors(store, "equal")
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(client: Client, store: Store) -> None:
    whole = _train(client, store, "whole", 2, [4, 8])
    first = _train(client, store, "halves", 2, [4])
    second = _train(client, store, "halves", 2, [8])  # another driver: state comes from the store

    assert [m.loss for m in (*first, *second)] == [m.loss for m in whole]
    assert _equal(_tensors(store, "halves"), _tensors(store, "whole"))


def test_each_stage_stores_only_what_it_owns(client: Client, store: Store) -> None:
    _train(client, store, "parts", 3, [2])
    checkpoint = latest(store, "parts")
    assert checkpoint is not None
    parts = {part.part: {n for n in part.tensors if "/" not in n} for part in checkpoint.parts}
    assert sorted(parts) == ["stage-0", "stage-1", "stage-2"]
    assert "transformer.wte.weight" in parts["stage-0"]  # tied: the first holder owns it
    names = [n for part in parts.values() for n in part]
    assert sorted(names) == sorted(p.name for p in tiny_graph().parameters)


def test_boundary_tensors_go_from_worker_to_worker(client: Client, store: Store) -> None:
    spec, programs = _run(store, "direct", 2)
    addresses = list(workers_of(client).values())[:2]
    with Driver(client, spec, programs, addresses, _ignore, LOAD) as driver:
        result = driver.segment(0, 3, lambda *_: {})
    hidden = BATCH * CONTEXT * 32 * 4  # (B, T, width) fp32
    wte = VOCABULARY * 32 * 4
    down, up = (report.sent_bytes for report in result.reports)
    assert down >= 3 * (MICROBATCHES * hidden + wte)  # activations, its part of the tied gradient
    assert up >= 3 * (MICROBATCHES * hidden + wte)
    assert down < 1.2 * 3 * (MICROBATCHES * hidden + wte)  # and nothing else: one tensor a cut


class _Broken(RandomTokens):
    """Labels that are out of range from a certain step on."""

    def microbatch(
        self, step: int, microbatch: int, names: Sequence[str]
    ) -> Mapping[str, torch.Tensor]:
        batch = super().microbatch(step, microbatch, names)
        bad = VOCABULARY + 5
        return {n: t + bad if n == "labels" and step == 2 else t for n, t in batch.items()}


def test_a_failing_stage_ends_the_segment_with_its_own_reason(client: Client, store: Store) -> None:
    spec, programs = _run(store, "broken", 3, data=_Broken(BATCH, CONTEXT, VOCABULARY))
    addresses = list(workers_of(client).values())
    with (
        Driver(client, spec, programs, addresses, _ignore, LOAD) as driver,
        pytest.raises(IndexError, match="out of bounds"),
    ):
        driver.segment(0, 4, lambda *_: {})
    assert latest(store, "broken") is None
    # The workers are free again at once, and the engine is unharmed.
    assert len(_train(client, store, "after", 3, [2])) == 2


def test_a_loss_that_is_not_finite_is_named(client: Client, store: Store) -> None:
    hot = replace(OPTIMIZER, learning_rate=1e30, warmup_steps=0, clip_norm=None)
    spec, programs = _run(store, "hot", 2, optimizer=hot)
    addresses = list(workers_of(client).values())[:2]
    with (
        Driver(client, spec, programs, addresses, _ignore, LOAD) as driver,
        pytest.raises(StageError, match="lower the learning rate") as caught,
    ):
        driver.segment(0, 20, lambda *_: {})
    assert not isinstance(caught.value, NeighbourFailed)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_killed_worker_ends_the_segment_and_the_run_goes_on_elsewhere(
    store: Store, stages: int
) -> None:
    with process_cluster(stages + 1) as cluster, cluster.client() as client:
        undisturbed = _train(client, store, "calm", stages, [4, 8])
        struck = threading.Event()

        def strike(measure: StepMeasure) -> None:
            if measure.step == 6 and not struck.is_set():
                struck.set()
                cluster.kill("w0")

        with pytest.raises(StageLost, match="left the cluster"):
            _train(client, store, "struck", stages, [4, 2000], strike)
        assert struck.is_set()
        last = latest(store, "struck")
        assert last is not None
        assert last.step == 4

        rest = _train(client, store, "struck", stages, [8])

        assert [m.loss for m in rest] == [m.loss for m in undisturbed[4:]]
        assert _equal(_tensors(store, "struck"), _tensors(store, "calm"))
