"""One step of a pipeline, event by event, with workers that are lost and replaced in the middle of it.

The rules are those of `timing.py`: a worker runs its schedule in order, an action starts when the worker
is free and its input is there, a worker's sends leave one after the other. On top of them:

- a worker that is lost takes its running action and what has not left its uplink with it;
- its replacement begins when it is ready, runs the step's schedule from the start, since only the
  boundary tensors are kept, and sends nothing that has arrived, or is on its way, already;
- its neighbours wait, they compute nothing again.

Times are on the step's own clock. Events at the same time are taken in a fixed order.

Covers: the pipeline. Not covered: what comes before a replacement is ready (`simulator.py`), and the end of
the step (`predict.py`).

Invariant: without outages the step takes what `timing.makespan_s` says.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from fusion_dask.planner.records import Schedule
from fusion_dask.planner.schedule import Direction, StageAction, orders
from fusion_dask.planner.timing import StageTimes

__all__ = ["Interval", "Outage", "StepRun", "run_step"]

Kind = Literal["forward", "backward", "send", "return", "down"]


class Interval(NamedTuple):
    """Something that a worker, or its uplink, was busy with.

    Attributes:
        worker: Place in the pipeline.
        kind: `send` and `return` are the uplink's: activations and gradients. `down` is from a loss
            until the replacement is ready.
        stage: Which; -1 where it does not apply.
        microbatch: Which; -1 where it does not apply.
        start_s: On the step's clock.
        stop_s: On the step's clock.
        lost: It was in vain.
    """

    worker: int
    kind: Kind
    stage: int
    microbatch: int
    start_s: float
    stop_s: float
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outage:
    """A worker is lost and replaced.

    Attributes:
        worker: Place in the pipeline.
        at_s: When it is lost.
        ready_s: When its replacement can start.
        times: Of the whole pipeline with the replacement, one candidate.
    """

    worker: int
    at_s: float
    ready_s: float
    times: StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """What happened in a step.

    Attributes:
        end_s: When the last action ended.
        intervals: In the order of their starts.
    """

    end_s: float
    intervals: tuple[Interval, ...]

    def busy_s(self, worker: int) -> float:
        """How long a worker computed, in vain or not."""
        return sum(
            i.stop_s - i.start_s
            for i in self.intervals
            if i.worker == worker and i.kind in {"forward", "backward"}
        )


def run_step(
    schedule: Schedule,
    microbatches: int,
    times: StageTimes,
    *,
    chunks: int = 1,
    outages: Sequence[Outage] = (),
) -> StepRun:
    """Run one step.

    Args:
        schedule: The order of forwards and backwards.
        microbatches: In the step.
        times: Of one candidate.
        chunks: Stages per worker.
        outages: Workers that are lost in it.

    Raises:
        ValueError: The schedule does not exist for these numbers.
    """
    stages = times.forward_s.shape[0]
    plan = orders(schedule, stages // chunks, microbatches, chunks)
    step = _Step(plan, stages, microbatches, times)
    return step.run(outages)


class _Event(IntEnum):
    """What happens; of events at the same time the lower one first."""

    DONE = 0
    ARRIVED = 1
    LOST = 2
    READY = 3


class _Lists(NamedTuple):
    """Seconds by row of stage and direction: stage for forwards, stages + stage for backwards."""

    duration: list[float]
    occupied: list[float]
    delay: list[float]

    @classmethod
    def of(cls, times: StageTimes) -> "_Lists":
        return cls(
            duration=[*times.forward_s[:, 0].tolist(), *times.backward_s[:, 0].tolist()],
            occupied=[*times.send_s[:, 0].tolist(), *times.return_s[:, 0].tolist()],
            delay=[*times.send_delay_s[:, 0].tolist(), *times.return_delay_s[:, 0].tolist()],
        )


class _Running(NamedTuple):
    action: StageAction
    start_s: float


class _Sent(NamedTuple):
    """A tensor that left or waits in an uplink; `left_s` is when its last byte leaves."""

    row: int
    interval: Interval
    left_s: float


class _Step:
    """The state of a step: workers, tensors, and what is going to happen."""

    def __init__(
        self,
        plan: Sequence[Sequence[StageAction]],
        stages: int,
        microbatches: int,
        times: StageTimes,
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._microbatches = microbatches
        self._times = _Lists.of(times)
        workers = len(plan)
        self._next = [0] * workers
        self._up = [True] * workers
        self._lives = [0] * workers
        self._running: list[_Running | None] = [None] * workers
        self._uplink_s = [0.0] * workers
        self._sent: list[list[_Sent]] = [[] for _ in plan]
        self._has = bytearray(2 * stages * microbatches)
        # Forwards of the first stage and backwards of the last one wait for nothing but their turn.
        self._has[:microbatches] = b"\1" * microbatches
        self._has[-microbatches:] = b"\1" * microbatches
        #: For each tensor that is on its way the token of its arrival, else 0.
        self._coming = [0] * len(self._has)
        self._events: list[tuple[float, int, int, int, int]] = []
        self._count = 0
        self._intervals: list[Interval] = []
        self._end_s = 0.0

    def run(self, outages: Sequence[Outage]) -> StepRun:
        for i, outage in enumerate(outages):
            self._push(outage.at_s, _Event.LOST, i, 0)
        for worker in range(len(self._plan)):
            self._start(worker, 0.0)
        while self._events:
            now_s, event, _, subject, token = heapq.heappop(self._events)
            if event == _Event.DONE:
                if token == self._lives[subject]:
                    self._finish(subject, now_s)
            elif event == _Event.ARRIVED:
                self._arrive(subject, token, now_s)
            elif event == _Event.LOST:
                self._lose(outages[subject], now_s)
            elif token == self._lives[subject]:
                self._up[subject] = True
                self._start(subject, now_s)
        assert all(n == len(order) for n, order in zip(self._next, self._plan, strict=True)), (
            "the schedule blocks itself"
        )
        ordered = sorted(self._intervals, key=lambda i: (i.start_s, i.worker))
        return StepRun(end_s=self._end_s, intervals=tuple(ordered))

    def _push(self, at_s: float, event: _Event, subject: int, token: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, event, self._count, subject, token))

    def _code(self, action: StageAction) -> int:
        backward = action.direction is Direction.BACKWARD
        return action.stage + (self._stages if backward else 0)

    def _start(self, worker: int, now_s: float) -> None:
        order, at = self._plan[worker], self._next[worker]
        if not self._up[worker] or self._running[worker] is not None or at == len(order):
            return
        action = order[at]
        code = self._code(action)
        if not self._has[code * self._microbatches + action.microbatch]:
            return
        self._running[worker] = _Running(action, now_s)
        done_s = now_s + self._times.duration[code]
        self._push(done_s, _Event.DONE, worker, self._lives[worker])

    def _finish(self, worker: int, now_s: float) -> None:
        running = self._running[worker]
        assert running is not None
        self._running[worker] = None
        self._next[worker] += 1
        self._end_s = max(self._end_s, now_s)
        self._note(worker, running, now_s)
        self._send(worker, running.action, now_s)
        self._start(worker, now_s)

    def _note(self, worker: int, running: _Running, stop_s: float, *, lost: bool = False) -> None:
        action, start_s = running
        kind: Kind = "forward" if action.direction is Direction.FORWARD else "backward"
        self._intervals.append(
            Interval(worker, kind, action.stage, action.microbatch, start_s, stop_s, lost)
        )

    def _send(self, worker: int, action: StageAction, now_s: float) -> None:
        code = self._code(action)
        forward = code < self._stages
        # What the last forward makes stays where it is; the first backward makes nothing to send.
        if action.stage == (self._stages - 1 if forward else 0):
            return
        row = (code + 1 if forward else code - 1) * self._microbatches + action.microbatch
        if self._has[row] or self._coming[row]:
            return
        start_s = max(now_s, self._uplink_s[worker])
        left_s = start_s + self._times.occupied[code]
        self._uplink_s[worker] = left_s
        kind: Kind = "send" if forward else "return"
        interval = Interval(worker, kind, action.stage, action.microbatch, start_s, left_s)
        self._intervals.append(interval)
        self._sent[worker].append(_Sent(row, interval, left_s))
        token = self._coming[row] = self._count + 1
        self._push(left_s + self._times.delay[code], _Event.ARRIVED, row, token)

    def _arrive(self, row: int, token: int, now_s: float) -> None:
        if token != self._coming[row]:
            return
        self._has[row] = 1
        stage = row // self._microbatches % self._stages
        self._start(stage % len(self._plan), now_s)

    def _lose(self, outage: Outage, now_s: float) -> None:
        worker = outage.worker
        self._lives[worker] += 1
        running = self._running[worker]
        if running is not None:
            self._note(worker, running, now_s, lost=True)
        for sent in self._sent[worker]:
            if sent.left_s > now_s:
                self._coming[sent.row] = 0
                self._intervals.remove(sent.interval)
                if sent.interval.start_s < now_s:
                    self._intervals.append(sent.interval._replace(stop_s=now_s, lost=True))
        self._sent[worker].clear()
        self._running[worker] = None
        self._up[worker] = False
        self._next[worker] = 0
        self._uplink_s[worker] = outage.ready_s
        self._times = _Lists.of(outage.times)
        self._intervals.append(Interval(worker, "down", -1, -1, now_s, outage.ready_s))
        self._push(outage.ready_s, _Event.READY, worker, self._lives[worker])
