"""What holds for every plan: memory, cover, order, names, and that more is never worse."""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusion_dask.errors import PlanError
from fusion_dask.planner.placement import find_plan, score
from fusion_dask.planner.records import (
    ANY,
    ENGINE,
    Capabilities,
    ModelCost,
    Objective,
    PoolPlan,
    PoolWorker,
    Workload,
)
from support.planning import random_model, random_pool, with_links, with_memory

seeds = st.integers(0, 10_000)
untimed = settings(deadline=None, max_examples=60)
few = settings(deadline=None, max_examples=12)
#: `ANY` with fewer merges and chunks, to keep the cases small.
SOME = replace(ANY, chunks=(2,), merges=(1, 2), max_replicas=3)


def _plan(
    model: ModelCost,
    pool: list[PoolWorker],
    capabilities: Capabilities,
    objective: Objective = Objective.THROUGHPUT,
) -> PoolPlan | None:
    try:
        return find_plan(
            model, pool, Workload(microbatches=6), capabilities=capabilities, objective=objective
        )
    except PlanError:
        return None


def _check(plan: PoolPlan, model: ModelCost, pool: list[PoolWorker]) -> None:
    free = {w.name: w.profile.free_memory_bytes for w in pool}
    used: list[str] = []
    for replica, predicted in zip(plan.replicas, plan.prediction.replicas, strict=True):
        blocks = [b for s in replica.stages for b in range(s.start, s.stop)]
        assert blocks == list(range(len(model.blocks))), "each block once, in the data's order"
        assert all(s.start < s.stop for s in replica.stages)
        names = [s.worker for s in replica.stages]
        assert names == names[: len(names) // replica.chunks] * replica.chunks
        used += sorted(set(names))
        need: dict[str, int] = {}
        for stage in predicted.stages:
            need[stage.worker] = need.get(stage.worker, 0) + stage.memory_bytes
        for name, size in need.items():
            assert size <= free[name]
    assert len(used) == len(set(used)), "no worker serves twice"
    assert sorted([*used, *plan.backup]) == sorted(free)


@untimed
@given(seeds, st.sampled_from([ENGINE, SOME]), st.sampled_from(list(Objective)))
def test_every_plan_fits_and_covers_the_model_once(
    seed: int, capabilities: Capabilities, objective: Objective
) -> None:
    source = random.Random(seed)
    model = random_model(source, source.randint(1, 7), tied=True)
    pool = with_memory(random_pool(source, source.randint(1, 4)), source.choice([0.3, 1.0]))
    plan = _plan(model, pool, capabilities, objective)
    if plan is not None:
        _check(plan, model, pool)
        if capabilities is ENGINE:
            (replica,) = plan.replicas
            assert (replica.schedule, replica.chunks, replica.merge) == ("1f1b", 1, 1)
            assert not any(s.recomputes for s in replica.stages)


@few
@given(seeds)
def test_large_pools_too(seed: int) -> None:
    source = random.Random(seed)
    model = random_model(source, 14)
    pool = random_pool(source, 9)
    plan = find_plan(model, pool, Workload(microbatches=8), capabilities=SOME, effort=1e6)
    _check(plan, model, pool)


def _renamed(pool: list[PoolWorker], names: dict[str, str]) -> list[PoolWorker]:
    return [
        replace(
            w,
            name=names[w.name],
            profile=replace(
                w.profile, links={names.get(n, n): x for n, x in w.profile.links.items()}
            ),
        )
        for w in pool
    ]


@untimed
@given(seeds, st.integers(2, 5), st.permutations(range(5)))
def test_a_renamed_pool_gets_the_renamed_plan(seed: int, workers: int, order: list[int]) -> None:
    source = random.Random(seed)
    model = random_model(source, 6)
    pool = random_pool(source, workers)
    names = {f"w{i}": f"machine {order[i]}" for i in range(workers)}
    plan, other = (_plan(model, p, ENGINE) for p in (pool, _renamed(pool, names)))
    assume(plan is not None)
    assert plan is not None
    assert other is not None
    before = [(names[s.worker], s.start, s.stop) for s in plan.replicas[0].stages]
    after = [(s.worker, s.start, s.stop) for s in other.replicas[0].stages]
    assert before == after
    assert other.prediction.step_s == plan.prediction.step_s


@untimed
@given(seeds, st.sampled_from(list(Objective)))
def test_the_order_of_the_pool_does_not_matter(seed: int, objective: Objective) -> None:
    source = random.Random(seed)
    model, pool = random_model(source, 5), random_pool(source, 4)
    plan, other = (_plan(model, p, ENGINE, objective) for p in (pool, pool[::-1]))
    assume(plan is not None)
    assert plan is not None
    assert other is not None
    assert score(other.prediction, objective) == pytest.approx(
        score(plan.prediction, objective), rel=1e-9
    )


@untimed
@given(seeds, st.sampled_from(list(Objective)))
def test_one_more_worker_is_never_worse(seed: int, objective: Objective) -> None:
    source = random.Random(seed)
    model, pool = random_model(source, 6), random_pool(source, 4)
    fewer = _plan(model, pool[:-1], ENGINE, objective)
    more = _plan(model, pool, ENGINE, objective)
    if fewer is not None:
        assert more is not None
        least = score(fewer.prediction, objective)
        assert score(more.prediction, objective) <= least * (1 + 1e-9)


@untimed
@given(seeds, st.sampled_from(list(Objective)), st.sampled_from([1.5, 10.0]))
def test_more_bandwidth_is_never_worse(seed: int, objective: Objective, factor: float) -> None:
    source = random.Random(seed)
    model, pool = random_model(source, 6), random_pool(source, 4)
    plan = _plan(model, pool, ENGINE, objective)
    wider = _plan(model, with_links(pool, factor), ENGINE, objective)
    if plan is not None:
        assert wider is not None
        least = score(plan.prediction, objective)
        assert score(wider.prediction, objective) <= least * (1 + 1e-9)


def test_a_large_pool_gives_the_same_plan_whatever_its_names() -> None:
    source = random.Random(5)
    model, pool = random_model(source, 20), random_pool(source, 10)
    names = {w.name: f"machine {9 - i}" for i, w in enumerate(pool)}
    first, second, other = (
        find_plan(model, p, Workload(microbatches=8), capabilities=ENGINE, effort=2e6)
        for p in (pool, pool, _renamed(pool, names))
    )
    assert first == second
    assert [names[s.worker] for s in first.replicas[0].stages] == [
        s.worker for s in other.replicas[0].stages
    ]


def test_a_pool_that_is_too_small_says_how_much_is_missing() -> None:
    source = random.Random(5)
    model, pool = random_model(source, 6), with_memory(random_pool(source, 2), 1e-3)
    with pytest.raises(PlanError, match=r"needs at least .* GB .* add workers with .* GB"):
        find_plan(model, pool, Workload(microbatches=2))


def test_an_empty_pool_says_how_to_lend() -> None:
    with pytest.raises(PlanError, match="fusion join"):
        find_plan(random_model(random.Random(1), 3), [], Workload(microbatches=1))
