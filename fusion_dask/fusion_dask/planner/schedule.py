"""The order of forwards and backwards in a stage.

1F1B after Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503),
in its synchronous form (PipeDream-Flush): stage s of S runs min(M, S - s - 1) forwards to warm up,
then alternates, then drains. At most min(M, S - s) microbatches are in flight, and both forwards and
backwards run in the order of the microbatches: gradient sums are always taken in the same order.
"""

from enum import StrEnum
from typing import NamedTuple

__all__ = ["Action", "Direction", "ideal_bubble", "in_flight", "one_f_one_b"]


class Direction(StrEnum):
    """Forward or backward."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One entry of a schedule."""

    direction: Direction
    microbatch: int


def one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """The 1F1B order of one stage for one step.

    >>> " ".join(f"{d}{m}" for d, m in one_f_one_b(0, 2, 3))
    'F0 F1 B0 F2 B1 B2'
    >>> " ".join(f"{d}{m}" for d, m in one_f_one_b(1, 2, 3))
    'F0 B0 F1 B1 F2 B2'
    """
    warmup = min(microbatches, stages - stage - 1)
    order = [Action(Direction.FORWARD, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        order.append(Action(Direction.FORWARD, warmup + m))
        order.append(Action(Direction.BACKWARD, m))
    order += [Action(Direction.BACKWARD, m) for m in range(microbatches - warmup, microbatches)]
    return tuple(order)


def in_flight(stage: int, stages: int, microbatches: int) -> int:
    """The most microbatches whose activations a stage holds at once."""
    return min(microbatches, stages - stage)


def ideal_bubble(stages: int, microbatches: int) -> float:
    """The idle share of a stage in a balanced pipeline: (S - 1) / (M + S - 1).

    >>> round(ideal_bubble(2, 8), 3)
    0.111
    """
    return (stages - 1) / (microbatches + stages - 1)
