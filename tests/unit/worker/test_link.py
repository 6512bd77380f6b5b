"""The arithmetic of an emulated link, on a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.devices.emulation import Shape
from fusion_dask.worker.link import ShapedLink

SIZES = st.lists(st.integers(0, 10**7), min_size=1, max_size=9)
SHAPES = st.builds(Shape, bytes_per_s=st.floats(1e4, 1e9), delay_s=st.floats(0.0, 0.2))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def transfer(clock: Clock, sender: ShapedLink, receiver: ShapedLink, size: int) -> float:
    """Seconds of one transfer from sender to receiver, both of which sleep."""
    began = clock.now
    departure = sender.send(size)
    clock.now += departure.wait_s
    clock.now += receiver.receive(size, departure.sending_s)
    return clock.now - began


@given(SHAPES, st.integers(0, 10**8))
def test_a_transfer_between_equal_links_is_counted_once(shape: Shape, size: int) -> None:
    clock = Clock()
    took_s = transfer(clock, ShapedLink(shape, clock), ShapedLink(shape, clock), size)
    assert took_s == pytest.approx(shape.delay_s + size / shape.bytes_per_s, abs=1e-9)


@given(SHAPES, SHAPES, st.integers(0, 10**8))
def test_the_narrower_end_decides(one: Shape, other: Shape, size: int) -> None:
    clock = Clock()
    took_s = transfer(clock, ShapedLink(one, clock), ShapedLink(other, clock), size)
    slower = min(one.bytes_per_s, other.bytes_per_s)
    assert took_s == pytest.approx(one.delay_s + size / slower, rel=1e-9, abs=1e-9)


@given(SHAPES, SIZES)
def test_what_is_sent_at_once_leaves_one_after_the_other(shape: Shape, sizes: list[int]) -> None:
    clock = Clock()
    link = ShapedLink(shape, clock)
    waits = [link.send(size).wait_s for size in sizes]
    for index, wait_s in enumerate(waits):
        before = sum(sizes[: index + 1])
        assert wait_s == pytest.approx(shape.delay_s + before / shape.bytes_per_s, abs=1e-9)


@given(SHAPES, SIZES)
def test_what_arrives_at_once_shares_the_downlink(shape: Shape, sizes: list[int]) -> None:
    """From senders that are not shaped."""
    clock = Clock()
    link = ShapedLink(shape, clock)
    waits = [link.receive(size, 0.0) for size in sizes]
    assert waits[-1] == pytest.approx(sum(sizes) / shape.bytes_per_s, abs=1e-9)
    assert waits == sorted(waits)


@given(SHAPES, st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 10**6)), min_size=1))
def test_no_more_passes_than_the_rate_allows(shape: Shape, sends: list[tuple[float, int]]) -> None:
    clock = Clock()
    link = ShapedLink(shape, clock)
    passed = 0
    for pause_s, size in sends:
        clock.now += pause_s
        departed_s = clock.now + link.send(size).wait_s - shape.delay_s
        passed += size
        assert passed <= shape.bytes_per_s * departed_s * (1 + 1e-9) + 1e-6


def test_a_link_that_is_not_shaped_costs_nothing() -> None:
    link = ShapedLink()
    assert (link.send(10**9).wait_s, link.receive(10**9, 0.0), link.delay_s) == (0.0, 0.0, 0.0)
