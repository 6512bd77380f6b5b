"""The pace of an emulated device, on clocks that the test moves."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.graph.cut import valid_positions
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_dask.worker.pace import Pace
from support.models import BATCH, CONTEXT, MICROBATCHES, VOCABULARY, tiny_graph
from support.pipelines import RandomTokens, train_pipeline


@dataclass
class Clocks:
    """Wall and CPU time, and what was slept."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    sleeps: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.wall_s += seconds

    def compute(self, cpu_s: float, interrupted_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s + interrupted_s

    def pace(self, fraction: float) -> Pace:
        return Pace(fraction, lambda: self.wall_s, lambda: self.cpu_s, self.sleep)


@given(
    st.floats(0.01, 0.999),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=9),
)
def test_work_takes_its_cpu_time_over_the_fraction(
    fraction: float, pieces: list[tuple[float, float]]
) -> None:
    clocks = Clocks()
    pace = clocks.pace(fraction)
    for cpu_s, interrupted_s in pieces:
        began = clocks.wall_s
        with pace.work():
            clocks.compute(cpu_s, interrupted_s)
        # Whoever was interrupted for long enough is slow already.
        expected = max(cpu_s / fraction, cpu_s + interrupted_s)
        assert clocks.wall_s - began == pytest.approx(expected, abs=1e-9)


def test_the_full_speed_does_not_even_look_at_the_clock() -> None:
    def fail() -> float:
        raise AssertionError

    with Pace(1.0, fail, fail).work():
        pass


def test_work_that_fails_fails() -> None:
    clocks = Clocks()
    with pytest.raises(RuntimeError, match="of the work"), clocks.pace(0.5).work():
        raise RuntimeError("of the work")
    assert not clocks.sleeps


def test_the_backward_of_a_cpu_tensor_runs_on_the_calling_thread() -> None:
    """Else the CPU time of the calling thread would not be that of the work."""
    threads: list[int] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            return gradients[0]

    x = torch.ones(2, requires_grad=True)
    Watched.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert threads == [threading.get_ident()]


def test_the_pace_alters_no_bit_of_a_result() -> None:
    positions = sorted(valid_positions(tiny_graph(0.1)))
    middle = positions[len(positions) // 2]

    def train(pace: Pace) -> dict[str, torch.Tensor]:
        return train_pipeline(
            tiny_graph(0.1),
            [middle],
            RandomTokens(BATCH, CONTEXT, VOCABULARY),
            steps=3,
            microbatches=MICROBATCHES,
            optimizer=OptimizerConfig(total_steps=3),
            pace=pace,
        ).tensors

    slept: list[float] = []
    slow = train(Pace(0.5, clock=lambda: 0.0, sleep=slept.append))
    fast = train(Pace())
    # Forward, backward and update of each stage were paced.
    assert len(slept) >= 2 * 3 * (2 * MICROBATCHES + 1)
    assert slow.keys() == fast.keys()
    assert all(torch.equal(slow[name], tensor) for name, tensor in fast.items())
