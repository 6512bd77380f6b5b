"""Which worker holds which stage, after any change of the pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.errors import StageLost
from fusion_dask.planner.plan import Plan, StagePlan
from fusion_tasks.placement import place


def plan(*workers: str) -> Plan:
    stages = tuple(
        StagePlan(worker=w, operators=1, parameters=1, flops=1, sent_bytes=1) for w in workers
    )
    return Plan(positions=tuple(range(1, len(stages))), stages=stages, microbatches=1)


def pool(*names: str) -> dict[str, str]:
    return {name: f"tls://{name}" for name in names}


def test_stages_go_where_the_plan_wants_them() -> None:
    assert place(plan("c", "a"), pool("a", "b", "c"), None) == (("c", "tls://c"), ("a", "tls://a"))


def test_a_lost_worker_is_replaced_and_nobody_else_moves() -> None:
    assert place(plan("a", "b"), pool("c", "b"), None) == (("c", "tls://c"), ("b", "tls://b"))


def test_too_few_workers_are_an_error_unless_the_stages_are_placed() -> None:
    with pytest.raises(StageLost, match="worker b is gone"):
        place(plan("a", "b"), pool("a"), None)
    current = (("a", "tls://a"), ("b", "tls://b"))
    assert place(plan("a", "b"), pool("a"), current) == current


NAMES = st.lists(st.sampled_from("abcdef"), unique=True)


@given(NAMES, NAMES, NAMES)
def test_no_two_stages_share_a_worker(wanted: list[str], first: list[str], then: list[str]) -> None:
    try:
        current = place(plan(*wanted), pool(*first), None)
    except StageLost:
        return
    moved = place(plan(*wanted), pool(*then), current)
    assert len({name for name, _ in moved}) == len(wanted)
    if len(then) >= len(wanted):
        assert {name for name, _ in moved} <= set(then)
    assert place(plan(*wanted), pool(*then), moved) == moved
