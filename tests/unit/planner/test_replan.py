"""Re-planning moves what pays off, says what it moves, and else keeps still."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_dask.errors import PlanError
from fusion_dask.planner.placement import find_plan
from fusion_dask.planner.records import ENGINE, ModelCost, PoolPlan, PoolWorker, Workload
from fusion_dask.planner.replan import RESTART_S, Replan, replan
from support.planning import link, random_model, random_pool, with_memory, worker

WORK = Workload(microbatches=8)
LONG = 100_000


def _replan(
    model: ModelCost, pool: list[PoolWorker], plan: PoolPlan, horizon_steps: int = LONG
) -> Replan:
    return replan(
        model, pool, plan.replicas, WORK, horizon_steps=horizon_steps, capabilities=ENGINE
    )


def _named(plan: PoolPlan) -> list[tuple[str, int, int]]:
    return [(s.worker, s.start, s.stop) for r in plan.replicas for s in r.stages]


def _equal(count: int) -> list[PoolWorker]:
    links = {"broker": link(0.0005, 1e9)}
    return [worker(f"w{i}", links=links) for i in range(count)]


def _scaled(on: PoolWorker, factor: float) -> PoolWorker:
    rates = {d: r * factor for d, r in on.profile.flops_per_s.items()}
    return replace(on, profile=replace(on.profile, flops_per_s=rates))


@pytest.fixture(scope="module")
def model() -> ModelCost:
    return random_model(random.Random(3), 12)


def test_nothing_happens_when_nothing_happened(model: ModelCost) -> None:
    pool = _equal(3)
    plan = find_plan(model, pool, WORK, capabilities=ENGINE)
    found = _replan(model, pool, plan)
    assert (found.plan, found.moves, found.move_s, found.gain_s) == (plan, (), 0.0, 0.0)


def test_a_lost_worker_is_replaced_and_only_its_stage_moves(model: ModelCost) -> None:
    pool = _equal(4)
    plan = find_plan(model, pool, WORK, capabilities=ENGINE, stages=3)
    lost = plan.replicas[0].stages[1]
    found = _replan(model, [w for w in pool if w.name != lost.worker], plan, horizon_steps=1)
    (spare,) = plan.backup
    assert _named(found.plan) == [
        (spare if name == lost.worker else name, a, z) for name, a, z in _named(plan)
    ]
    (move,) = found.moves
    assert (move.worker, move.source, move.start, move.stop) == (
        spare,
        None,  # nobody else had it: from the store
        lost.start,
        lost.stop,
    )
    state = plan.prediction.replicas[0].stages[1].state_bytes
    assert move.size_bytes == state
    assert found.move_s == pytest.approx(RESTART_S + state / 2e9)
    assert found.gain_s is None


def test_a_joined_worker_is_used_only_if_the_run_is_long_enough(model: ModelCost) -> None:
    pool = _equal(3)
    plan = find_plan(model, pool[:2], WORK, capabilities=ENGINE)
    assert _replan(model, pool, plan, horizon_steps=1).moves == ()
    found = _replan(model, pool, plan)
    assert len(found.plan.replicas[0].stages) == 3
    assert found.gain_s is not None
    saved = plan.prediction.step_s - found.plan.prediction.step_s
    assert found.gain_s == pytest.approx(LONG * saved - found.move_s)
    # What is where it was does not move.
    before = {(w, b) for w, a, z in _named(plan) for b in range(a, z)}
    after = {(w, b) for w, a, z in _named(found.plan) for b in range(a, z)}
    moved = {(m.worker, b) for m in found.moves for b in range(m.start, m.stop)}
    assert moved == after - before
    assert all(m.source is not None for m in found.moves)


def test_a_worker_that_slows_down_gets_less(model: ModelCost) -> None:
    pool = _equal(3)
    plan = find_plan(model, pool, WORK, capabilities=ENGINE, stages=3)
    slow = plan.replicas[0].stages[1].worker
    drifted = [_scaled(w, 0.4) if w.name == slow else w for w in pool]
    found = _replan(model, drifted, plan)
    assert found.gain_s is not None
    assert found.gain_s > 0
    shares = [
        {n: sum(b.forward_flops for b in model.blocks[a:z]) for n, a, z in _named(p)}
        for p in (plan, found.plan)
    ]
    assert shares[1].get(slow, 0.0) < shares[0][slow]


def test_what_is_left_is_not_enough(model: ModelCost) -> None:
    pool = with_memory(_equal(3), 0.5)
    plan = find_plan(model, pool, WORK, capabilities=ENGINE)
    with pytest.raises(PlanError, match="GB"):
        _replan(model, with_memory(pool[:1], 0.1), plan)


@given(st.integers(0, 10_000), st.sampled_from([1, 100, 10_000]))
@settings(deadline=None, max_examples=40)
def test_a_change_always_repays_its_move(seed: int, horizon_steps: int) -> None:
    source = random.Random(seed)
    model, pool = random_model(source, 6), random_pool(source, 4)
    try:
        plan = find_plan(model, pool[:3], WORK, capabilities=ENGINE)
    except PlanError:
        return
    now = [_scaled(w, source.choice([0.5, 1.0, 1.0])) for w in pool]
    found = _replan(model, now, plan, horizon_steps)
    assert found.gain_s is not None
    assert found.gain_s >= 0
    free = {w.name: w.profile.free_memory_bytes for w in now}
    for stage in found.plan.prediction.replicas[0].stages:
        assert stage.memory_bytes <= free[stage.worker]
    held = {(w, b) for w, a, z in _named(plan) for b in range(a, z)}
    needed = {(w, b) for w, a, z in _named(found.plan) for b in range(a, z)}
    fetched = {(m.worker, b) for m in found.moves for b in range(m.start, m.stop)}
    assert fetched == needed - held
