"""The cost model, part by part, against numbers by hand and against a plain evaluation."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_dask.planner.cost_model import (
    EFFICIENCY,
    IDLE_SHARE,
    CostModel,
    block_seconds,
)
from fusion_dask.planner.exhaustive import count, every, twins
from fusion_dask.planner.links import UNKNOWN, LinkTable
from fusion_dask.planner.model_cost import merged_at
from fusion_dask.planner.predict import predict
from fusion_dask.planner.profile import LinkProfile
from fusion_dask.planner.records import (
    PlacedReplica,
    PlacedStage,
    PoolWorker,
    Schedule,
    Workload,
)
from fusion_dask.planner.schedule import can_run, held_at_peak, ideal_bubble, orders
from fusion_dask.planner.tables import Tables
from fusion_dask.planner.timing import StageTimes, lower_bound_s, makespan_s
from support.planning import (
    link,
    naive_makespan_s,
    naive_memory,
    random_model,
    worker,
)

untimed = settings(deadline=None)


def _times(stages: int, **known: list[float]) -> StageTimes:
    def column(name: str) -> np.ndarray:
        return np.array(known.get(name, [0.0] * stages), dtype=np.float64)[:, None]

    return StageTimes(
        forward_s=column("forward"),
        backward_s=column("backward"),
        send_s=column("send"),
        send_delay_s=column("send_delay"),
        return_s=column("back"),
        return_delay_s=column("back_delay"),
    )


@given(
    st.sampled_from(["1f1b", "gpipe", "interleaved"]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([2, 3]),
    st.integers(0, 10_000),
)
@untimed
def test_the_levels_give_what_running_the_schedule_gives(
    schedule: Schedule, workers: int, microbatches: int, chunks: int, seed: int
) -> None:
    if schedule == "interleaved":
        workers, microbatches = workers + 1, (workers + 1) * (1 + microbatches // 4)
    else:
        chunks = 1
    assert can_run(schedule, workers, microbatches, chunks)
    stages = workers * chunks
    source = random.Random(seed)

    def some() -> list[float]:
        return [source.choice([0.0, source.uniform(0, 2)]) for _ in range(stages)]

    times = {n: some() for n in ("forward", "backward", "send", "send_delay", "back", "back_delay")}
    times["send"][-1] = times["send_delay"][-1] = times["back"][0] = times["back_delay"][0] = 0.0
    order = [
        [(a.direction.value, a.microbatch, a.stage) for a in o]
        for o in orders(schedule, workers, microbatches, chunks)
    ]
    naive = naive_makespan_s(
        order,
        times["forward"],
        times["backward"],
        list(zip(times["send"], times["send_delay"], strict=True)),
        list(zip(times["back"], times["back_delay"], strict=True)),
    )
    batch = _times(stages, **times)
    assert makespan_s(schedule, microbatches, batch, chunks=chunks)[0] == pytest.approx(naive)
    held = held_at_peak(schedule, workers, microbatches, chunks)
    assert lower_bound_s(microbatches, batch, held, chunks=chunks)[0] <= naive * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (3, 3), (4, 16), (6, 2)])
def test_equal_stages_and_free_links_give_the_closed_bubble(
    schedule: Schedule, stages: int, microbatches: int
) -> None:
    times = _times(stages, forward=[1.0] * stages, backward=[2.0] * stages)
    total = makespan_s(schedule, microbatches, times)[0]
    assert 1 - 3 * microbatches / total == pytest.approx(ideal_bubble(stages, microbatches))


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    whole = _times(4, forward=[2.0] * 4, backward=[4.0] * 4)
    halves = _times(8, forward=[1.0] * 8, backward=[2.0] * 8)
    work = 6.0 * 8
    bubble = makespan_s("1f1b", 8, whole)[0] - work
    assert makespan_s("interleaved", 8, halves, chunks=2)[0] - work == pytest.approx(bubble / 2)


def test_many_candidates_at_once_are_each_by_themselves() -> None:
    rows = np.random.default_rng(1).uniform(0, 1, (6, 3, 40))
    rows[2, -1] = rows[3, -1] = rows[4, 0] = rows[5, 0] = 0.0
    names = ("forward_s", "backward_s", "send_s", "send_delay_s", "return_s", "return_delay_s")
    batch = StageTimes(**dict(zip(names, rows, strict=True)))
    together = makespan_s("1f1b", 7, batch)
    for i in range(40):
        assert makespan_s("1f1b", 7, batch.take(np.array([i])))[0] == together[i]


def test_a_block_takes_the_longer_of_arithmetic_and_traffic() -> None:
    model = random_model(random.Random(1), 1)
    on = worker("w").profile
    block = replace(model.blocks[0], forward_flops=1e12, forward_bytes=0.0, streamed_bytes=0.0)
    forward, _ = block_seconds(replace(model, blocks=(block,)), on)
    assert forward[0] == pytest.approx(1e12 / (1e13 * 0.5))
    block = replace(block, forward_bytes=1e12, streamed_bytes=5e11)
    forward, _ = block_seconds(replace(model, blocks=(block,)), on)
    assert forward[0] == pytest.approx(1.5e12 / 5e11)
    # Parameters are read once however many microbatches are merged.
    forward, _ = block_seconds(replace(model, blocks=(block,)), on, merge=4)
    assert forward[0] == pytest.approx(4.5e12 / 5e11)


def test_what_was_not_measured_has_a_stated_stand_in() -> None:
    model = replace(random_model(random.Random(1), 1), dtype="bfloat16")
    block = replace(model.blocks[0], forward_flops=1e15, forward_bytes=0.0, streamed_bytes=0.0)
    model = replace(model, blocks=(block,))
    fresh = replace(worker("w").profile, efficiency=None)  # knows float32 only
    forward, _ = block_seconds(model, fresh)
    assert forward[0] == pytest.approx(1e15 / (1e13 * EFFICIENCY["bfloat16"]))


def _link(delay_s: float, send: float, receive: float) -> LinkProfile:
    return LinkProfile(delay_s=delay_s, send_bytes_per_s=send, receive_bytes_per_s=receive)


def test_links_come_from_either_end_or_from_the_broker() -> None:
    pool = [
        worker("a", links={"broker": _link(0.01, 1e7, 4e7), "b": _link(0.002, 3e7, 5e7)}),
        worker("b", links={"broker": _link(0.02, 2e7, 9e7)}),
        worker("c", links={}),
    ]
    table = LinkTable.of(pool)

    def seen(sender: int, receiver: int) -> tuple[float, float]:
        link = table.between(sender, receiver)
        return link.delay_s, link.bytes_per_s

    assert seen(0, 1) == (0.002, 3e7)
    assert seen(1, 0) == (0.002, 5e7)  # as the receiver measured it
    assert seen(1, 2) == (0.02 + UNKNOWN.delay_s, 2e7)
    assert seen(0, 2) == (0.01 + UNKNOWN.delay_s, 3e7)  # the fastest that the sender knows
    assert seen(2, 2) == (0.0, float("inf"))


@given(st.integers(0, 10_000), st.integers(0, 6))
@untimed
def test_the_tables_are_sums_over_ranges(seed: int, held: int) -> None:
    model = random_model(random.Random(seed), 5, tied=True)
    workload = Workload(microbatches=1)
    tables = Tables.of(model, workload)
    for i in range(5):
        for j in range(i + 1, 6):
            for table, again in ((tables.memory, False), (tables.memory_recomputing, True)):
                expected = naive_memory(model, i, j, held, workload, recomputes=again)
                assert table(held)[i, j] == pytest.approx(expected)


def test_merging_microbatches_scales_activations_and_no_parameters() -> None:
    model, workload = random_model(random.Random(2), 4), Workload(microbatches=4)
    one, two = Tables.of(model, workload), Tables.of(model, workload, merge=2)
    assert np.array_equal(two.fixed_bytes, one.fixed_bytes)
    assert np.array_equal(two.saved_bytes, 2 * one.saved_bytes)
    assert np.array_equal(two.activation_bytes, 2 * one.activation_bytes)


@given(st.integers(0, 10_000))
@untimed
def test_merged_blocks_cost_what_their_parts_cost(seed: int) -> None:
    model, workload = random_model(random.Random(seed), 6, tied=True), Workload(microbatches=1)
    edges = [0, 2, 3, 6]
    fine, coarse = Tables.of(model, workload), Tables.of(merged_at(model, edges), workload)
    for i, a in enumerate(edges):
        for j in range(i + 1, len(edges)):
            z = edges[j]
            assert coarse.memory(2)[i, j] == pytest.approx(fine.memory(2)[a, z])
            assert coarse.state_bytes[i, j] == pytest.approx(fine.state_bytes[a, z])


def _stages(*parts: tuple[str, int, int]) -> tuple[PlacedStage, ...]:
    return tuple(PlacedStage(worker=w, start=a, stop=z) for w, a, z in parts)


def _pool() -> list[PoolWorker]:
    links = {"broker": link(0.01, 1e8), "store": link(0.01, 5e7)}
    return [
        worker(f"w{i}", links=links, price=3.6, power_w=100.0, flops_per_s=1e13 * (i + 1))
        for i in range(4)
    ]


def test_the_parts_of_a_prediction_add_up() -> None:
    model = random_model(random.Random(3), 4, tied=True)
    workload = Workload(microbatches=4, checkpoint_every_steps=10)
    replica = PlacedReplica(
        stages=_stages(("w1", 0, 3), ("w0", 3, 4)), schedule="1f1b", microbatches=4
    )
    found = predict(model, _pool(), [replica], workload)
    (pipeline,) = found.replicas
    parts = found.pipeline_s + found.exchange_s + found.update_s + found.commit_s
    assert found.step_s == pytest.approx(parts)
    assert found.sync_s == found.journal_s == 0.0
    assert found.tokens_per_s == pytest.approx(4 * model.tokens / found.step_s)
    # Tied gradients cross once in either direction, the norm there and back: 20 ms a way.
    assert found.exchange_s == pytest.approx(40e6 / 1e8 + 0.02 + 0.04)
    assert found.commit_s == pytest.approx(max(s.state_bytes for s in pipeline.stages) / 5e7 / 10)
    # Two workers at 3.6 an hour.
    assert found.cost_per_token == pytest.approx(0.002 * found.step_s / (4 * model.tokens))
    busy = sum(4 * (s.forward_s + s.backward_s) + s.update_s for s in pipeline.stages)
    joules = 100.0 * (IDLE_SHARE * 2 * found.step_s + (1 - IDLE_SHARE) * busy)
    assert found.energy_j_per_token == pytest.approx(joules / (4 * model.tokens))
    assert 0 < pipeline.bubble < 1


def test_a_slow_store_holds_up_a_journalled_step() -> None:
    model, pool = random_model(random.Random(3), 4), _pool()
    replica = PlacedReplica(
        stages=_stages(("w1", 0, 2), ("w0", 2, 4)), schedule="1f1b", microbatches=4
    )
    plain = predict(model, pool, [replica], Workload(microbatches=4))
    slow = [
        replace(w, profile=replace(w.profile, links={**w.profile.links, "store": link(0.01, 1e5)}))
        for w in pool
    ]
    written = predict(model, slow, [replica], Workload(microbatches=4, journals=True))
    most = max(model.boundary_bytes[1], model.gradient_boundary_bytes[1])
    assert written.step_s == pytest.approx(4 * most / 1e5)
    assert written.journal_s == pytest.approx(written.step_s - plain.step_s)


def test_replicas_pay_for_a_ring() -> None:
    model = random_model(random.Random(3), 2)
    replicas = [
        PlacedReplica(stages=_stages((f"w{i}", 0, 2)), schedule="1f1b", microbatches=2)
        for i in range(3)
    ]
    every_step = predict(model, _pool(), replicas, Workload(microbatches=6))
    gradients = sum(b.gradient_bytes for b in model.blocks)
    assert every_step.sync_s == pytest.approx(2 * 2 / 3 * gradients / 1e8 + 4 * 0.02)
    rarely = predict(model, _pool(), replicas, Workload(microbatches=6, sync_every_steps=50))
    assert rarely.sync_s == pytest.approx(every_step.sync_s / 50)


def test_a_plan_that_skips_a_block_is_no_plan() -> None:
    model = random_model(random.Random(3), 4)
    replica = PlacedReplica(
        stages=_stages(("w1", 0, 2), ("w0", 3, 4)), schedule="1f1b", microbatches=1
    )
    with pytest.raises(ValueError, match="every block"):
        predict(model, _pool(), [replica], Workload(microbatches=1))
    stranger = PlacedReplica(stages=_stages(("x", 0, 4)), schedule="1f1b", microbatches=1)
    with pytest.raises(ValueError, match="no worker x"):
        predict(model, _pool(), [stranger], Workload(microbatches=1))


@given(st.integers(2, 4), st.integers(1, 3), st.sampled_from([2, 3]))
def test_no_chunk_holds_more_than_it_says(workers: int, groups: int, chunks: int) -> None:
    microbatches = workers * groups
    most = held_at_peak("interleaved", workers, microbatches, chunks)
    assert len(most) == workers * chunks
    assert max(most) <= microbatches
    assert most[0] == max(most)


def test_twins_are_equal_devices_with_equal_links() -> None:
    far = {"broker": link(0.5, 1e8)}
    pool = [worker("a"), worker("b", flops_per_s=2e13), worker("c"), worker("d", links=far)]
    heads = twins(pool, LinkTable.of(pool))
    assert heads == (0, 1, 0, 3)
    costs = CostModel(random_model(random.Random(1), 4), pool, Workload(microbatches=1))
    candidates = [
        tuple(column) for batch in every(costs, 1, 2, heads) for column in batch.workers.T.tolist()
    ]
    assert len(candidates) == count(4, heads, 1, [2])
    orders = set(candidates)
    assert (0, 2) in orders  # both twins together
    assert (2, 1) not in orders  # the second twin alone is the first one
