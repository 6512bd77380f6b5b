"""The search against every subset, order and cut, priced by a time model of the test's own."""

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest

import fusion_dask.planner.pipelines as pipelines
from fusion_dask.errors import PlanError
from fusion_dask.planner.placement import find_plan
from fusion_dask.planner.records import (
    ENGINE,
    ModelCost,
    Objective,
    PoolWorker,
    Workload,
)
from fusion_dask.planner.schedule import in_flight, orders
from support.planning import naive_memory, naive_step_s, random_model, random_pool, with_memory

CASES = 210


def _one_f_one_b(workers: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    return [
        [(a.direction.value, a.microbatch, a.stage) for a in order]
        for order in orders("1f1b", workers, microbatches)
    ]


def _every_plan(
    model: ModelCost, pool: list[PoolWorker], workload: Workload, *, recompute: bool
) -> Iterator[tuple[float, tuple[PoolWorker, ...]]]:
    """Step and workers of every plan that fits."""
    blocks, microbatches = len(model.blocks), workload.microbatches
    for size in range(1, min(len(pool), blocks) + 1):
        order = _one_f_one_b(size, microbatches)
        for workers in permutations(pool, size):
            for cuts in combinations(range(1, blocks), size - 1):
                edges = (0, *cuts, blocks)
                stages = []
                for s, (on, (a, z)) in enumerate(zip(workers, pairwise(edges), strict=True)):
                    held = in_flight(s, size, microbatches)
                    for again in (False, True) if recompute else (False,):
                        need = naive_memory(model, a, z, held, workload, recomputes=again)
                        if need <= on.profile.free_memory_bytes:
                            stages.append((on, again))
                            break
                if len(stages) == size:
                    yield naive_step_s(model, stages, edges, order, workload), workers


def _case(seed: int) -> tuple[ModelCost, list[PoolWorker], Workload]:
    source = random.Random(seed)
    model = random_model(source, source.randint(3, 7), tied=seed % 3 == 0)
    pool = random_pool(source, source.randint(2, 4))
    return model, pool, Workload(microbatches=source.choice([1, 4, 10]))


def _ratio(seed: int, *, recompute: bool = False, memory: float = 1.0) -> float | None:
    """The planner's step over the best one; None where nothing fits."""
    model, pool, workload = _case(seed)
    pool = with_memory(pool, memory)
    every = [step for step, _ in _every_plan(model, pool, workload, recompute=recompute)]
    capabilities = replace(ENGINE, recomputes=recompute)
    if not every:
        with pytest.raises(PlanError):
            find_plan(model, pool, workload, capabilities=capabilities)
        return None
    return find_plan(model, pool, workload, capabilities=capabilities).prediction.step_s / min(
        every
    )


def test_no_plan_is_better_than_the_one_that_is_found() -> None:
    ratios = [r for seed in range(CASES + 40) if (r := _ratio(seed)) is not None]
    assert len(ratios) >= 200
    assert statistics.median(ratios) == pytest.approx(1.0, abs=1e-9)
    assert max(ratios) == pytest.approx(1.0, abs=1e-9)
    assert min(ratios) == pytest.approx(1.0, abs=1e-9)  # the two time models agree


def test_recomputation_is_chosen_where_it_makes_the_model_fit() -> None:
    every = [_ratio(seed, recompute=True, memory=0.4) for seed in range(30)]
    without = [_ratio(seed, memory=0.4) for seed in range(30)]
    ratios = [r for r in every if r is not None]
    assert len(ratios) > sum(r is not None for r in without)
    assert max(ratios) == pytest.approx(1.0, abs=1e-9)


def test_the_cheapest_plan_is_found() -> None:
    for seed in range(20):
        model, pool, workload = _case(seed)
        prices = [
            step * sum(w.price_per_hour for w in workers) / 3600
            for step, workers in _every_plan(model, pool, workload, recompute=False)
        ]
        if prices:
            plan = find_plan(model, pool, workload, objective=Objective.COST, capabilities=ENGINE)
            per_step = plan.prediction.cost_per_token * model.tokens * workload.microbatches
            assert per_step == pytest.approx(min(prices), rel=1e-9)


def test_the_search_for_large_pools_is_near_the_best_on_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same cases without the exact enumeration."""
    monkeypatch.setattr(pipelines, "EXACT", 0)
    ratios = [r for seed in range(60) if (r := _ratio(seed)) is not None]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=1e-9)
    assert max(ratios) <= 1.02
