"""The order of forwards and backwards in a stage, and on a worker that holds several.

1F1B after Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503),
in its synchronous form (PipeDream-Flush): stage s of S runs min(M, S - s - 1) forwards to warm up,
then alternates, then drains. At most min(M, S - s) microbatches are in flight, and both forwards and
backwards run in the order of the microbatches: gradient sums are always taken in the same order.

GPipe after Huang et al. (arXiv 1811.06965): all forwards, then all backwards; here the backwards run
in the order of the microbatches too, for the sake of the same sums.

Interleaved 1F1B after Narayanan et al. (arXiv 2104.04473), as Megatron-LM orders it: each of W
workers holds v stages, stage c·W + w on worker w; microbatches advance in groups of W through the
chunks; worker w warms up with 2 (W - w - 1) + (v - 1) W forwards. M must be a multiple of W.
"""

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from fusion_dask.planner.records import Schedule

__all__ = [
    "Action",
    "Direction",
    "StageAction",
    "can_run",
    "held_at_peak",
    "ideal_bubble",
    "in_flight",
    "one_f_one_b",
    "orders",
]


class Direction(StrEnum):
    """Forward or backward."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One entry of a schedule."""

    direction: Direction
    microbatch: int


class StageAction(NamedTuple):
    """One entry of a worker's schedule."""

    direction: Direction
    microbatch: int
    stage: int


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
    """The most microbatches whose activations a stage holds at once in 1F1B."""
    return min(microbatches, stages - stage)


def ideal_bubble(stages: int, microbatches: int) -> float:
    """The idle share of a stage in a balanced pipeline: (S - 1) / (M + S - 1).

    >>> round(ideal_bubble(2, 8), 3)
    0.111
    """
    return (stages - 1) / (microbatches + stages - 1)


def can_run(schedule: Schedule, workers: int, microbatches: int, chunks: int) -> bool:
    """Whether a schedule exists for these numbers."""
    if schedule != "interleaved":
        return chunks == 1
    return chunks > 1 and workers > 1 and microbatches % workers == 0


@lru_cache(maxsize=64)
def orders(
    schedule: Schedule, workers: int, microbatches: int, chunks: int = 1
) -> tuple[tuple[StageAction, ...], ...]:
    """For each worker what it does in one step, in order.

    Args:
        schedule: Which one.
        workers: Workers in the pipeline.
        microbatches: Microbatches in a step.
        chunks: Stages per worker; stage i is on worker i mod `workers`.

    Raises:
        ValueError: The schedule does not exist for these numbers, see `can_run`.
    """
    if not can_run(schedule, workers, microbatches, chunks):
        raise ValueError(
            f"no {schedule} schedule of {microbatches} microbatches over {workers} workers "
            f"with {chunks} chunks"
        )
    if schedule == "interleaved":
        return tuple(_interleaved(w, workers, microbatches, chunks) for w in range(workers))
    if schedule == "gpipe":
        every = range(microbatches)
        return tuple(
            tuple(StageAction(d, m, w) for d in Direction for m in every) for w in range(workers)
        )
    return tuple(
        tuple(StageAction(d, m, w) for d, m in one_f_one_b(w, workers, microbatches))
        for w in range(workers)
    )


def _interleaved(
    worker: int, workers: int, microbatches: int, chunks: int
) -> tuple[StageAction, ...]:
    total = microbatches * chunks

    def nth(k: int, direction: Direction) -> StageAction:
        group, within = divmod(k, workers * chunks)
        chunk, offset = divmod(within, workers)
        if direction is Direction.BACKWARD:
            chunk = chunks - 1 - chunk
        return StageAction(direction, group * workers + offset, chunk * workers + worker)

    warmup = min(total, 2 * (workers - worker - 1) + (chunks - 1) * workers)
    order = [nth(k, Direction.FORWARD) for k in range(warmup)]
    for k in range(total - warmup):
        order.append(nth(warmup + k, Direction.FORWARD))
        order.append(nth(k, Direction.BACKWARD))
    order += [nth(k, Direction.BACKWARD) for k in range(total - warmup, total)]
    return tuple(order)


@lru_cache(maxsize=64)
def held_at_peak(
    schedule: Schedule, workers: int, microbatches: int, chunks: int = 1
) -> tuple[int, ...]:
    """For each stage the most microbatches that it holds at once.

    The chunks of a worker do not all peak at the same time: their sum is an upper bound.

    >>> held_at_peak("1f1b", 3, 8), held_at_peak("gpipe", 3, 8)
    ((3, 2, 1), (8, 8, 8))
    """
    if schedule == "gpipe":
        return (microbatches,) * workers
    if schedule == "1f1b":
        return tuple(in_flight(w, workers, microbatches) for w in range(workers))
    held = [0] * (workers * chunks)
    most = [0] * (workers * chunks)
    for order in orders(schedule, workers, microbatches, chunks):
        for action in order:
            held[action.stage] += 1 if action.direction is Direction.FORWARD else -1
            most[action.stage] = max(most[action.stage], held[action.stage])
    return tuple(most)
