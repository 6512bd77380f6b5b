"""One step, event by event: the planner's recurrence, the closed formulas, and lost workers."""

import random
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.planner.records import Schedule
from fusion_dask.planner.schedule import ideal_bubble
from fusion_dask.planner.simulator_step import Outage, StepRun, run_step
from fusion_dask.planner.timing import StageTimes, makespan_s

SCHEDULES: tuple[tuple[Schedule, int], ...] = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))


def column(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


def random_times(source: random.Random, stages: int) -> StageTimes:
    """Uneven stages, slow links; the ends send nothing."""

    def some(scale: float, empty: int | None = None) -> np.ndarray:
        return column([0.0 if i == empty else source.random() * scale for i in range(stages)])

    return StageTimes(
        forward_s=some(1.0),
        backward_s=some(2.0),
        send_s=some(1.5, stages - 1),
        send_delay_s=some(1.0, stages - 1),
        return_s=some(1.5, 0),
        return_delay_s=some(1.0, 0),
    )


def equal_times(stages: int, forward_s: float, backward_s: float) -> StageTimes:
    none = column([0.0] * stages)
    return StageTimes(
        forward_s=none + forward_s,
        backward_s=none + backward_s,
        send_s=none,
        send_delay_s=none,
        return_s=none,
        return_delay_s=none,
    )


@given(st.integers(0, 2**32), st.sampled_from(SCHEDULES), st.integers(2, 6))
def test_a_step_takes_what_the_recurrence_says(
    seed: int, how: tuple[Schedule, int], workers: int
) -> None:
    source, (schedule, chunks) = random.Random(seed), how
    microbatches = source.randint(1, 4) * (workers if schedule == "interleaved" else 1)
    times = random_times(source, workers * chunks)
    run = run_step(schedule, microbatches, times, chunks=chunks)
    expected = float(makespan_s(schedule, microbatches, times, chunks=chunks)[0])
    assert run.end_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (4, 8), (8, 3)])
def test_equal_stages_and_free_links_have_the_ideal_bubble(
    schedule: Schedule, stages: int, microbatches: int
) -> None:
    run = run_step(schedule, microbatches, equal_times(stages, 1.0, 2.0))
    assert run.end_s == pytest.approx((microbatches + stages - 1) * 3.0)
    idle = 1 - run.busy_s(stages // 2) / run.end_s
    assert idle == pytest.approx(ideal_bubble(stages, microbatches))


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    workers, microbatches, chunks = 4, 8, 2
    run = run_step("interleaved", microbatches, equal_times(8, 0.5, 1.0), chunks=chunks)
    assert run.end_s == pytest.approx((microbatches + (workers - 1) / chunks) * 3.0)


def by_lane(run: StepRun) -> list[list[tuple[float, float]]]:
    """Intervals of each worker and of each uplink."""
    kinds = {"forward": 0, "backward": 0, "down": 0, "send": 1, "return": 1}
    rows = sorted(((i.worker, kinds[i.kind]), i.start_s, i.stop_s) for i in run.intervals)
    return [[(a, z) for _, a, z in lane] for _, lane in groupby(rows, key=lambda r: r[0])]


@given(st.integers(0, 2**32), st.sampled_from(SCHEDULES), st.integers(2, 5))
def test_a_replacement_repeats_its_stage_and_nobody_else_does(
    seed: int, how: tuple[Schedule, int], workers: int
) -> None:
    source, (schedule, chunks) = random.Random(seed), how
    microbatches = source.randint(1, 3) * workers
    times = random_times(source, workers * chunks)
    clean = run_step(schedule, microbatches, times, chunks=chunks)
    lost = source.randrange(workers)
    at_s = source.uniform(0.0, clean.end_s * 1.1)
    outage = Outage(worker=lost, at_s=at_s, ready_s=at_s + source.uniform(0.0, 9.0), times=times)
    run = run_step(schedule, microbatches, times, chunks=chunks, outages=[outage])

    assert run.end_s >= clean.end_s
    assert run.end_s <= outage.ready_s + clean.end_s * 2 + 1e-9
    computed = [i for i in run.intervals if i.kind in {"forward", "backward"} and not i.lost]
    for worker in range(workers):
        mine = [(i.kind, i.stage, i.microbatch) for i in computed if i.worker == worker]
        again = [i for i in computed if i.worker == worker == lost and i.start_s >= outage.ready_s]
        wanted = 2 * chunks * microbatches
        if worker == lost:
            assert len(again) == wanted
            assert not any(
                i.start_s < outage.ready_s and i.stop_s > at_s for i in computed if i.worker == lost
            )
        else:
            assert len(mine) == len(set(mine)) == wanted
    sent = [(i.kind, i.stage, i.microbatch) for i in run.intervals if i.kind in {"send", "return"}]
    kept = [
        (i.kind, i.stage, i.microbatch)
        for i in run.intervals
        if i.kind in {"send", "return"} and not i.lost
    ]
    assert len(kept) == len(set(kept)) == 2 * (workers * chunks - 1) * microbatches
    assert set(sent) == set(kept)
    for lane in by_lane(run):
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(lane))


def test_a_tensor_that_had_left_is_not_sent_again() -> None:
    one = column([1.0, 1.0])
    times = StageTimes(
        forward_s=one,
        backward_s=one,
        send_s=column([1.0, 0.0]),
        send_delay_s=column([5.0, 0.0]),
        return_s=column([0.0, 1.0]),
        return_delay_s=column([0.0, 5.0]),
    )
    outage = Outage(worker=0, at_s=2.5, ready_s=3.0, times=times)
    run = run_step("1f1b", 1, times, outages=[outage])
    # Forward 0-1, sent 1-2, there at 7 though its sender died at 2.5; back at 15, backward to 16.
    assert run.end_s == pytest.approx(16.0)
    assert len([i for i in run.intervals if i.kind == "send"]) == 1
    assert len([i for i in run.intervals if i.kind == "forward" and i.worker == 0]) == 2


def test_a_tensor_that_was_leaving_is_sent_again() -> None:
    one = column([1.0, 1.0])
    times = StageTimes(
        forward_s=one,
        backward_s=one,
        send_s=column([1.0, 0.0]),
        send_delay_s=column([5.0, 0.0]),
        return_s=column([0.0, 1.0]),
        return_delay_s=column([0.0, 5.0]),
    )
    outage = Outage(worker=0, at_s=1.5, ready_s=3.0, times=times)
    run = run_step("1f1b", 1, times, outages=[outage])
    # Again from 3: forward to 4, sent to 5, there at 10, forward and backward to 12, back at 18.
    assert run.end_s == pytest.approx(19.0)
    assert [i.lost for i in run.intervals if i.kind == "send"] == [True, False]


def test_a_replacement_can_be_lost_too() -> None:
    times = equal_times(3, 1.0, 2.0)
    outages = [
        Outage(worker=1, at_s=4.5, ready_s=20.0, times=times),
        Outage(worker=1, at_s=10.0, ready_s=30.0, times=times),
    ]
    run = run_step("1f1b", 4, times, outages=outages)
    first = min(
        i.start_s for i in run.intervals if i.worker == 1 and i.start_s > 4.5 and i.stage == 1
    )
    assert first == 30.0


def test_a_slower_replacement_makes_the_rest_slower() -> None:
    times, slower = equal_times(3, 1.0, 2.0), equal_times(3, 1.0, 2.0)
    slower.forward_s[1] = 4.0
    same = run_step(
        "1f1b", 6, times, outages=[Outage(worker=1, at_s=5.0, ready_s=6.0, times=times)]
    )
    slow = run_step(
        "1f1b", 6, times, outages=[Outage(worker=1, at_s=5.0, ready_s=6.0, times=slower)]
    )
    assert slow.end_s >= same.end_s + 6 * 3.0


def test_events_of_a_large_step_are_few() -> None:
    """50 stages and 128 microbatches: one interval an action and one a tensor."""
    source = random.Random(0)
    run = run_step("1f1b", 128, random_times(source, 50))
    assert len(run.intervals) == 2 * 50 * 128 + 2 * 49 * 128
