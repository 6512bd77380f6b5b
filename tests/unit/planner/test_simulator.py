"""Hours of a pool: what the planner says without churn, and what losses, joins and checkpoints do to it."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_dask.errors import PlanError
from fusion_dask.planner.churn import (
    Change,
    away_share,
    drawn_trace,
    parse_rate,
    trace_from_json,
)
from fusion_dask.planner.predict import predict
from fusion_dask.planner.records import PlacedReplica, PlacedStage, PoolWorker, Workload
from fusion_dask.planner.simulator import simulate
from fusion_dask.planner.simulator_records import Recovery, Scenario, Simulation
from support.planning import random_model, worker

MODEL = random_model(random.Random(3), 8)
JOURNALS = Workload(microbatches=8, journals=True)
STAGES = 4


def equal_pool(count: int, memory_gb: float = 24) -> tuple[PoolWorker, ...]:
    return tuple(
        worker(f"w{i}", memory_gb=memory_gb, price=0.36, power_w=100.0) for i in range(count)
    )


def first_four(workers: Sequence[PoolWorker]) -> tuple[PlacedReplica, ...]:
    """A planner that always needs four."""
    if len(workers) < STAGES:
        raise PlanError("four workers are needed")
    share = len(MODEL.blocks) // STAGES
    stages = [
        PlacedStage(worker=w.name, start=i * share, stop=(i + 1) * share)
        for i, w in enumerate(workers[:STAGES])
    ]
    return (PlacedReplica(stages=tuple(stages), schedule="1f1b", microbatches=8),)


def scenario(count: int = 6, *changes: Change, **other: object) -> Scenario:
    made = Scenario(
        model=MODEL,
        pool=equal_pool(count),
        workload=JOURNALS,
        trace=changes,
        until_s=3600.0,
        checkpoint_s=300.0,
        recovery=Recovery(detect_s=5.0, start_s=2.0, replan_s=10.0),
    )
    return replace(made, **other)  # type: ignore[arg-type]


def quits(at_s: float, name: str) -> Change:
    return Change(at_s=at_s, worker=name, joins=False)


def joins(at_s: float, name: str) -> Change:
    return Change(at_s=at_s, worker=name, joins=True)


def check(found: Simulation) -> None:
    assert found.budget.total_s == pytest.approx(found.elapsed_s)
    assert found.tokens_per_s == pytest.approx(found.tokens / found.elapsed_s)
    assert found.replaced <= found.losses
    for a, b in zip(found.spans, found.spans[1:], strict=False):
        assert a.start_s < a.stop_s
        if a.worker == b.worker:
            assert a.stop_s <= b.start_s + 1e-9


def test_without_churn_it_is_the_prediction_and_the_checkpoints() -> None:
    asked = scenario()
    found = simulate(asked, first_four)
    check(found)
    expected = predict(MODEL, asked.pool, first_four(asked.pool), JOURNALS)
    assert found.prediction == expected
    assert found.budget.steps_s == pytest.approx(found.steps * expected.step_s)
    every = round(300.0 / expected.step_s)
    assert found.budget.checkpoints_s > 0
    assert found.steps >= 3600 / expected.step_s * (1 - 1 / every) - every
    assert found.energy_j / found.tokens == pytest.approx(expected.energy_j_per_token, rel=0.05)
    assert found.cost == pytest.approx(4 * 0.36 / 3600 * found.elapsed_s)
    assert found.step.run.end_s == pytest.approx(expected.pipeline_s)
    stages = expected.replicas[0].stages
    assert found.memory_bytes == {s.worker: s.memory_bytes for s in stages}
    assert sum(x.step_bytes for x in found.links) == sum(s.sent_bytes for s in stages)
    assert found.loss_step is None
    assert {s.state for s in found.spans} == {"stage 0", "stage 1", "stage 2", "stage 3", "backup"}


def test_mfu_is_the_models_flops_over_the_peak_of_who_takes_part() -> None:
    found = simulate(scenario(), first_four)
    per_token = MODEL.flops / MODEL.tokens
    assert found.mfu == pytest.approx(found.tokens_per_s * per_token / (4 * 1e13))


def test_a_lost_stage_is_taken_over_and_the_others_keep_their_steps() -> None:
    calm, found = (
        simulate(scenario(), first_four),
        simulate(scenario(6, quits(1000.0, "w1")), first_four),
    )
    check(found)
    assert (found.losses, found.replaced, found.replans) == (1, 1, 0)
    assert found.budget.repeated_s == 0
    # Detection, start, and at least the replay of that stage since the last checkpoint.
    assert found.budget.recovery_s > 7.0
    assert found.steps < calm.steps
    assert found.loss_step is not None
    assert [i.worker for i in found.loss_step.run.intervals if i.kind == "down"] == [1]
    states = {s.worker: s.state for s in found.spans}
    assert states["w1"] == "away"
    assert states["w4"] == "stage 1"


def test_replaying_takes_longer_the_longer_ago_the_checkpoint_was() -> None:
    soon = simulate(scenario(6, quits(330.0, "w1")), first_four)
    late = simulate(scenario(6, quits(590.0, "w1")), first_four)
    assert late.budget.recovery_s > soon.budget.recovery_s + 10


def test_without_a_journal_everybody_goes_back() -> None:
    asked = scenario(6, quits(1000.0, "w1"), workload=replace(JOURNALS, journals=False))
    found = simulate(asked, first_four)
    check(found)
    assert (found.losses, found.replaced, found.replans) == (1, 1, 0)
    assert found.budget.repeated_s > 0
    assert found.loss_step is None


def test_an_empty_backup_pool_means_a_new_plan_from_the_checkpoint() -> None:
    def two_or_four(workers: Sequence[PoolWorker]) -> tuple[PlacedReplica, ...]:
        if len(workers) >= STAGES:
            return first_four(workers)
        half = len(MODEL.blocks) // 2
        stages = [
            PlacedStage(worker=workers[0].name, start=0, stop=half),
            PlacedStage(worker=workers[1].name, start=half, stop=2 * half),
        ]
        return (PlacedReplica(stages=tuple(stages), schedule="1f1b", microbatches=8),)

    gone = scenario(4, quits(1000.0, "w1"))
    found = simulate(gone, two_or_four)
    check(found)
    assert (found.losses, found.replaced, found.replans) == (1, 0, 1)
    assert found.budget.repeated_s > 0
    assert found.budget.recovery_s > 17.0
    # When the fourth one is back, four are worth a change at the next checkpoint.
    back = simulate(replace(gone, trace=(*gone.trace, joins(1500.0, "w1"))), two_or_four)
    check(back)
    assert back.replans == 2
    assert back.tokens > found.tokens


def test_a_pool_that_cannot_hold_the_model_waits() -> None:
    found = simulate(scenario(4, quits(1000.0, "w1"), joins(2000.0, "w1")), first_four)
    check(found)
    assert 990.0 < found.budget.paused_s <= 1000.0
    assert found.replans == 1
    ended = simulate(scenario(4, quits(1000.0, "w1")), first_four)
    check(ended)
    assert ended.elapsed_s == pytest.approx(3600.0)
    with pytest.raises(PlanError, match="four workers"):
        simulate(scenario(3), first_four)


def test_the_replacement_has_the_memory_and_is_the_fastest() -> None:
    small = worker("small", memory_gb=1, flops_per_s=9e13)
    fast = worker("fast", memory_gb=24, flops_per_s=4e13)
    pool = (*equal_pool(5), small, fast)
    found = simulate(scenario(6, quits(1000.0, "w2"), pool=pool), first_four_of_equal)
    check(found)
    assert {s.worker: s.state for s in found.spans}["fast"] == "stage 2"


def first_four_of_equal(workers: Sequence[PoolWorker]) -> tuple[PlacedReplica, ...]:
    return first_four([w for w in workers if w.name.startswith("w")])


def test_two_losses_in_one_step_are_both_replaced() -> None:
    found = simulate(scenario(6, quits(1000.0, "w1"), quits(1000.5, "w3")), first_four)
    check(found)
    assert (found.losses, found.replaced) == (2, 2)
    again = simulate(scenario(6, quits(1000.0, "w1"), quits(1003.0, "w4")), first_four)
    check(again)
    assert (again.losses, again.replaced) == (2, 2)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.floats(0.1, 30.0), st.booleans())
def test_any_trace_keeps_the_books(seed: int, rate_per_h: float, journals: bool) -> None:
    workload = replace(JOURNALS, journals=journals)
    names = [f"w{i}" for i in range(6)]
    trace = drawn_trace(names, rate_per_h / 3600, away_s=300.0, until_s=3600.0, seed=seed)
    asked = scenario(6, *trace, workload=workload)
    found = simulate(asked, first_four)
    check(found)
    assert found.elapsed_s >= 3600 - 2 * found.prediction.step_s - found.budget.checkpoints_s
    assert found == simulate(asked, first_four)
    calm = simulate(scenario(workload=workload), first_four)
    assert found.steps <= calm.steps


def test_plans_are_made_once_for_equal_workers_and_spare_the_slowest() -> None:
    asked: list[list[str]] = []

    def planner(workers: Sequence[PoolWorker]) -> tuple[PlacedReplica, ...]:
        asked.append([w.name for w in workers])
        return first_four(workers)

    slow = tuple(replace(w, name=f"slow{w.name}") for w in equal_pool(1))
    slow = tuple(
        replace(w, profile=replace(w.profile, flops_per_s={"float32": 1e12})) for w in slow
    )
    none = replace(JOURNALS, journals=False)
    trace = (quits(1000.0, "w0"), joins(1200.0, "w0"), quits(2000.0, "w2"))
    found = simulate(
        scenario(4, *trace, pool=(*slow, *equal_pool(4)), spare=1, workload=none),
        planner,
    )
    assert found.losses == 2
    assert len(asked) == 1
    assert "sloww0" not in asked[0]


def test_a_long_simulation_is_written_as_json() -> None:
    found = simulate(scenario(6, quits(1000.0, "w1")), first_four)
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert plain["tokens_per_s"] == found.tokens_per_s
    assert plain["loss_step"]["intervals"][0]["worker"] == 0
    assert {s["state"] for s in plain["spans"]} >= {"restoring", "backup", "away"}


def test_drawn_churn_has_the_rate_and_does_not_depend_on_the_others() -> None:
    names = [f"w{i}" for i in range(200)]
    trace = drawn_trace(names, 0.1 / 3600, away_s=3600.0, until_s=100 * 3600.0, seed=1)
    leaving = sum(not c.joins for c in trace)
    # Each is there for 10 of 11 hours and then leaves: 200 · 100 / 11.
    assert leaving == pytest.approx(200 * 100 / 11, rel=0.05)
    assert away_share(0.1 / 3600, 3600.0) == pytest.approx(1 / 11)
    alone = drawn_trace(["w7"], 0.1 / 3600, away_s=3600.0, until_s=100 * 3600.0, seed=1)
    assert alone == tuple(c for c in trace if c.worker == "w7")
    assert list(trace) == sorted(trace, key=lambda c: c.at_s)


def test_a_recorded_trace_is_read_and_checked() -> None:
    plain = [
        {"at_s": 9, "worker": "a", "event": "join"},
        {"at_s": 1.5, "worker": "a", "event": "quit"},
    ]
    assert trace_from_json(plain, ["a"]) == (quits(1.5, "a"), joins(9.0, "a"))
    for wrong, message in (
        ({}, "a trace is a list"),
        ([{"at_s": 1}], "has at_s, worker and event"),
        ([{"at_s": -1, "worker": "a", "event": "quit"}], "seconds from the start"),
        ([{"at_s": 1, "worker": "b", "event": "quit"}], "not in the pool"),
        ([{"at_s": 1, "worker": "a", "event": "dies"}], "quit or join"),
    ):
        with pytest.raises(PlanError, match=message):
            trace_from_json(wrong, ["a"])
    for text in ("0.1", "x/h", "1.1.1/h", ""):
        with pytest.raises(PlanError, match=r"0\.1/h"):
            parse_rate(text)
