"""1F1B can be run by every stage at once, and holds no more than it says."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.planner.schedule import Action, Direction, ideal_bubble, in_flight, one_f_one_b

F, B = Direction.FORWARD, Direction.BACKWARD


@given(st.integers(1, 9), st.integers(1, 17))
def test_every_microbatch_goes_forward_then_backward_in_order(
    stages: int, microbatches: int
) -> None:
    for stage in range(stages):
        order = one_f_one_b(stage, stages, microbatches)
        assert [m for d, m in order if d is F] == list(range(microbatches))
        assert [m for d, m in order if d is B] == list(range(microbatches))
        held = most = 0
        for direction, _ in order:
            held += 1 if direction is F else -1
            most = max(most, held)
            assert held >= 0
        assert most == in_flight(stage, stages, microbatches)


def _ready(done: list[set[Action]], stage: int, action: Action) -> bool:
    if action.direction is F:
        return stage == 0 or action in done[stage - 1]
    return stage == len(done) - 1 or action in done[stage + 1]


def _rounds(stages: int, microbatches: int) -> Iterator[int]:
    """Stages that act in each unit of time, when forward and backward take one unit."""
    queues = [list(one_f_one_b(s, stages, microbatches)) for s in range(stages)]
    done: list[set[Action]] = [set() for _ in range(stages)]
    while any(queues):
        now = [s for s, q in enumerate(queues) if q and _ready(done, s, q[0])]
        assert now, "the schedule blocks itself"
        acted = [(s, queues[s].pop(0)) for s in now]
        for stage, action in acted:
            done[stage].add(action)
        yield len(now)


@given(st.integers(1, 8), st.integers(1, 16))
def test_the_bubble_is_the_ideal_one(stages: int, microbatches: int) -> None:
    busy = list(_rounds(stages, microbatches))
    idle = 1 - sum(busy) / (len(busy) * stages)
    assert idle == pytest.approx(ideal_bubble(stages, microbatches))
