"""How long a pipeline takes for one step: the dependencies of its schedule, evaluated exactly.

A step is a graph of actions (stage, direction, microbatch). The rules:

- a worker runs its actions in the order of its schedule; an action starts when the worker is free
  and its input has arrived;
- a worker has one uplink. What it sends, activations forward and gradients backward, leaves in the
  order in which it is made: a send starts when the tensor is made and the uplink is free, keeps the
  uplink for bytes / rate, and arrives that long and one delay after its start. Receivers do not
  queue. What a worker hands to itself is there at once.

So stages may be unequal, links slow and delays long, and the bubble is what comes of it; with equal
stages and free links it is the closed formula (S - 1) / (M + S - 1). The times are max-plus in their
inputs: no time can fall when an input rises.

The actions are sorted once per (schedule, workers, microbatches, chunks) into levels that do not
depend on each other; each level is a few numpy operations over all candidates at once. Last axis of
all arrays here: candidates (N).

Covers: times. Not covered: what makes them (`cost_model.py`); churn (`simulator.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.records import Schedule
from fusion_dask.planner.schedule import Direction, StageAction, orders

__all__ = ["StageTimes", "lower_bound_s", "makespan_s"]

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

#: Candidates that are evaluated at once are cut so that the table of arrivals stays below this.
TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds per microbatch of every stage, each of shape (stages, candidates).

    Attributes:
        forward_s: Forward.
        backward_s: Backward.
        send_s: Uplink time of its activation to the next stage; 0 for the last stage.
        send_delay_s: Delay of that link.
        return_s: Uplink time of its gradient to the stage before; 0 for the first stage.
        return_delay_s: Delay of that link.
    """

    forward_s: Floats
    backward_s: Floats
    send_s: Floats
    send_delay_s: Floats
    return_s: Floats
    return_delay_s: Floats

    def take(self, which: Indices) -> "StageTimes":
        """Some of the candidates."""
        return StageTimes(
            forward_s=self.forward_s[:, which],
            backward_s=self.backward_s[:, which],
            send_s=self.send_s[:, which],
            send_delay_s=self.send_delay_s[:, which],
            return_s=self.return_s[:, which],
            return_delay_s=self.return_delay_s[:, which],
        )


def makespan_s(
    schedule: Schedule, microbatches: int, times: StageTimes, *, chunks: int = 1
) -> Floats:
    """Seconds from the first forward to the last backward, for each candidate.

    >>> one, none = np.ones((3, 1)), np.zeros((3, 1))
    >>> free = dict(send_s=none, send_delay_s=none, return_s=none, return_delay_s=none)
    >>> times = StageTimes(forward_s=one, backward_s=2 * one, **free)
    >>> makespan_s("1f1b", 8, times).tolist()  # (M + S - 1) (f + b)
    [30.0]

    Raises:
        ValueError: The schedule does not exist for these numbers.
    """
    stages, count = times.forward_s.shape
    steps = _levels(schedule, stages // chunks, microbatches, chunks)
    rows = 2 * stages * microbatches + 1
    size = max(1, TABLE_BYTES // (8 * rows))
    parts = [
        _evaluate(steps, rows, stages // chunks, times.take(np.arange(a, min(a + size, count))))
        for a in range(0, count, size)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def lower_bound_s(
    microbatches: int, times: StageTimes, held: Sequence[int], *, chunks: int = 1
) -> Floats:
    """No schedule that holds so many microbatches is faster than this, for each candidate.

    For each worker: its first input has to come through all stages before its first one, then it is
    busy (computing, or sending) with all microbatches, and what it made last has to go back through
    those stages. For each stage: if it holds h microbatches at most, at least M / h of them follow each
    other from their forward to their backward, all later stages and links included.

    Args:
        microbatches: Microbatches in a step.
        times: Of the candidates.
        held: Per stage the most microbatches that it holds, `schedule.held_at_peak`.
        chunks: Stages per worker.
    """
    stages, count = times.forward_s.shape
    workers = stages // chunks
    zero = np.zeros((1, count))
    there = times.forward_s + times.send_s + times.send_delay_s
    back = times.backward_s + times.return_s + times.return_delay_s
    before = np.concatenate([zero, np.cumsum(there, axis=0)[:-1]])
    after = np.cumsum(back, axis=0) - times.backward_s
    busy = (times.forward_s + times.backward_s).reshape(chunks, workers, count).sum(axis=0)
    sends = (times.send_s + times.return_s).reshape(chunks, workers, count).sum(axis=0)
    compute: Floats = (before[:workers] + microbatches * busy + after[:workers]).max(axis=0)
    uplink: Floats = (microbatches * sends).max(axis=0)
    rest = np.cumsum((there + back)[::-1], axis=0)[::-1] - times.return_s - times.return_delay_s
    turns = -(-microbatches // np.asarray(held))[:, None]
    residence: Floats = (before + turns * rest + after).max(axis=0)
    return np.maximum(np.maximum(compute, uplink), residence)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Level:
    """Actions that do not depend on each other: worker, row of durations, own and next arrival."""

    workers: Indices
    codes: Indices
    arrivals: Indices
    consumers: Indices


@lru_cache(maxsize=64)
def _levels(schedule: Schedule, workers: int, microbatches: int, chunks: int) -> tuple[_Level, ...]:
    """All actions of a step; no level depends on itself or a later one."""
    stages = workers * chunks
    if schedule == "interleaved":
        rounds = _rounds(workers, microbatches, chunks)
    else:
        rounds = _closed_rounds(schedule, stages, microbatches)
    codes, microbatch = np.divmod(np.arange(2 * stages * microbatches), microbatches)
    order = np.argsort(rounds, kind="stable")
    starts = np.searchsorted(rounds[order], np.arange(rounds.max() + 2))
    # A forward goes to the next stage, a backward to the one before. What the last forward makes
    # stays on its worker, whose order already says what follows: it takes no uplink.
    consumer = (codes + np.where(codes < stages, 1, -1)) * microbatches + microbatch
    consumer[(codes == stages - 1) | (codes == stages)] = 2 * stages * microbatches
    return tuple(
        _Level(
            workers=codes[now] % stages % workers,
            codes=codes[now],
            arrivals=now,
            consumers=consumer[now],
        )
        for now in (order[a:z] for a, z in pairwise(starts))
    )


def _closed_rounds(schedule: Schedule, stages: int, microbatches: int) -> Indices:
    """The round of every action where every action takes one; rows as in the table of arrivals."""
    s = np.arange(stages)[:, None]
    m = np.arange(microbatches)[None, :]
    if schedule == "gpipe":
        forward, backward = s + m, 2 * stages + microbatches - 2 - s + m
    else:
        warmup = stages - 1 - s
        forward = np.where(m <= warmup, s + m, s + 2 * m)  # 2 S - 2 - s + 2 (m - warmup)
        backward = 2 * stages - 1 - s + 2 * m
    return np.concatenate([forward.ravel(), backward.ravel()])


def _rounds(workers: int, microbatches: int, chunks: int) -> Indices:
    """The same for interleaved 1F1B, by running it."""
    stages = workers * chunks
    queues = [list(reversed(o)) for o in orders("interleaved", workers, microbatches, chunks)]
    found = np.zeros(2 * stages * microbatches, dtype=np.intp)
    # Forwards of the first stage need nothing.
    arrived = {StageAction(Direction.FORWARD, m, 0) for m in range(microbatches)}
    for turn in count():
        if not any(queues):
            break
        now = [q.pop() for q in queues if q and q[-1] in arrived]
        assert now, "the schedule blocks itself"
        for action in now:
            backward = action.direction is Direction.BACKWARD
            row = (action.stage + stages * backward) * microbatches + action.microbatch
            found[row] = turn
        arrived.update(after for a in now if (after := _next(a, stages)) is not None)
    return found


def _next(action: StageAction, stages: int) -> StageAction | None:
    """What waits for this action's result."""
    direction, microbatch, stage = action
    if direction is Direction.FORWARD:
        if stage == stages - 1:
            return StageAction(Direction.BACKWARD, microbatch, stage)
        return StageAction(Direction.FORWARD, microbatch, stage + 1)
    return StageAction(Direction.BACKWARD, microbatch, stage - 1) if stage else None


def _evaluate(levels: Sequence[_Level], rows: int, workers: int, times: StageTimes) -> Floats:
    duration = np.concatenate([times.forward_s, times.backward_s])
    occupied = np.concatenate([times.send_s, times.return_s])
    delay = np.concatenate([times.send_delay_s, times.return_delay_s])
    count = duration.shape[1]
    arrival = np.zeros((rows, count))
    free = np.zeros((workers, count))
    uplink = np.zeros((workers, count))
    for level in levels:
        end = np.maximum(free[level.workers], arrival[level.arrivals])
        end += duration[level.codes]
        free[level.workers] = end
        sent = np.maximum(end, uplink[level.workers])
        sent += occupied[level.codes]
        uplink[level.workers] = sent
        arrival[level.consumers] = sent + delay[level.codes]
    latest: Floats = free.max(axis=0)
    return latest
