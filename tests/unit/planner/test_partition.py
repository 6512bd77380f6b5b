"""The partition is the best one: compared with trying every cut."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.errors import PlanError
from fusion_dask.planner.partition import SLACK, partition

Case = tuple[list[float], list[int], list[int], list[float]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(2, 11))
    seconds = draw(st.lists(st.integers(0, 20).map(float), min_size=count, max_size=count))
    positions = sorted(draw(st.sets(st.integers(1, count - 1), min_size=1)))
    bytes_at = draw(st.lists(st.integers(0, 9), min_size=count - 1, max_size=count - 1))
    stages = draw(st.integers(1, min(4, len(positions) + 1)))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=stages, max_size=stages))
    return seconds, positions, bytes_at, speeds


def _value(
    cut: Sequence[int], seconds: list[float], bytes_at: list[int], speeds: list[float]
) -> tuple[float, int]:
    edges = (0, *cut, len(seconds))
    stages = [
        sum(seconds[a:b]) / s for (a, b), s in zip(itertools.pairwise(edges), speeds, strict=True)
    ]
    return max(stages), sum(bytes_at[p - 1] for p in cut)


@given(cases())
def test_no_cut_with_an_accepted_bottleneck_carries_fewer_bytes(case: Case) -> None:
    seconds, positions, bytes_at, speeds = case
    found = partition(seconds, positions, bytes_at, speeds)

    every = [
        _value(cut, seconds, bytes_at, speeds)
        for cut in itertools.combinations(positions, len(speeds) - 1)
    ]
    best = min(bottleneck for bottleneck, _ in every)
    fewest = min(size for bottleneck, size in every if bottleneck <= best * SLACK * (1 + 1e-9))
    bottleneck, size = _value(found, seconds, bytes_at, speeds)
    assert bottleneck <= best * SLACK * (1 + 1e-9)
    assert size == fewest
    assert found == partition(seconds, positions, bytes_at, speeds)


def test_more_stages_than_cuts_says_how_many_there_can_be() -> None:
    with pytest.raises(PlanError, match="at most 3 stages"):
        partition([1.0] * 5, [2, 3], [1, 1, 1, 1], [1.0] * 4)
