"""Good cuts for given orders of workers: dynamic programmes over the blocks.

What keeps a pipeline from running a microbatch every T seconds:

- a stage whose computation, or whose worker's uplink, takes longer than T for one microbatch;
- in 1F1B, any run of n neighbouring stages whose computation and links, there and back, take longer
  than n T. (Forward down the run, backward up the run, and the first stage of it goes on with the
  microbatch after next in a run of two, with the n-th next in a run of n.) So slow or long links bind
  even when all transfers hide behind computation.

With e the most by which a run that begins at a stage exceeds its time, c a stage's computation and l its
link to the next stage and back, e(stage) = c - T + max(0, l + e(next)). A programme from the last stage
to the first takes, for every block at which a stage may begin, the smallest e, which must not be positive.
The shortest possible T of an order is found by bisection. Beside the cuts met on the way, those with the
shortest fill (one microbatch there and back) under some limits on the stages' periods are candidates too:
with few microbatches a longer period may pay for a shorter fill. Memory is a hard limit per stage; a
stage that does not fit recomputes, where that is allowed, and takes longer. The exact evaluation chooses
among the candidates.

All orders of a call are treated at once. Chunks of one worker are separate stages here, each with its
share of the worker's memory: a heuristic, as is every choice of orders (`local.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.cost_model import Candidates, CostModel
from fusion_dask.planner.evaluate import Setting
from fusion_dask.planner.schedule import held_at_peak

__all__ = ["LIMITS", "cuts_for"]

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

#: Periods over the best one at which the shortest fill is a candidate too.
LIMITS: Final = (1.05, 1.15, 1.35, 2.0)
#: Steps of the bisection.
BISECTIONS: Final = 4
#: Elements of a batch of matrices; keeps a call's memory near 50 MB.
ELEMENTS: Final = 1 << 20
#: Elements of the matrices of all stages that are kept from one pass to the next.
KEPT: Final = 1 << 22


def cuts_for(
    model: CostModel,
    orders: Indices,
    setting: Setting,
    limits: Sequence[float] = LIMITS,
) -> Candidates:
    """Candidates for orders of workers.

    Args:
        model: The model on the pool.
        orders: Places in the pool, (workers in the pipeline, number of orders).
        setting: What the candidates have in common.
        limits: Periods over the best one at which cuts are candidates too.

    Returns:
        Some candidates for each order; none for an order that cannot hold the model.
    """
    size = (model.tables.count + 1) ** 2
    at_once = max(1, ELEMENTS // size)
    parts = [
        _Chain(model, np.tile(orders[:, a : a + at_once], (setting.chunks, 1)), setting)
        for a in range(0, orders.shape[1], at_once)
    ]
    found = [c for part in parts for c in part.candidates(limits)]
    return Candidates(
        workers=np.concatenate([c.workers for c in found], axis=1),
        edges=np.concatenate([c.edges for c in found], axis=1),
        recomputes=np.concatenate([c.recomputes for c in found], axis=1),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """Every range of blocks as one stage, for every order: (orders, blocks + 1, blocks + 1)."""

    compute_s: Floats
    period_s: Floats  # of computation and uplink; infinite where it does not fit
    link_s: Floats  # to the next stage and back, by the block at which the stage ends


class _Chain:
    def __init__(self, model: CostModel, workers: Indices, setting: Setting) -> None:
        self._model = model
        self._workers = workers
        self._setting = setting
        size = workers.shape[0] // setting.chunks
        self._held = held_at_peak(setting.schedule, size, setting.microbatches, setting.chunks)
        count = model.tables.count
        self._proper = np.triu(np.ones((count + 1, count + 1), dtype=np.bool_), 1)
        self._kept: dict[int, _Stage] = {}
        self._keeps = workers.size * (count + 1) ** 2 <= KEPT

    def candidates(self, limits: Sequence[float]) -> Iterator[Candidates]:
        low = self._longest_stages()
        able = np.flatnonzero(np.isfinite(low))
        if len(able) < len(low):
            self._workers, low = self._workers[:, able], low[able]
            self._kept.clear()
        seen: list[Indices] = []
        high = np.full(len(low), np.inf)
        for period_s in (high, low):
            edges, possible = self._shortest_fill(period_s)
            high = np.minimum(high, np.where(possible, self._period_of(edges), np.inf))
            yield self._new(edges, possible, seen)
        if self._setting.schedule == "1f1b":
            for _ in range(BISECTIONS):
                middle = np.sqrt(low * high)
                edges, possible = self._in_time(middle)
                low = np.where(possible, low, middle)
                high = np.minimum(high, np.where(possible, self._period_of(edges), np.inf))
                yield self._new(edges, possible, seen)
        for limit in limits:
            yield self._new(*self._shortest_fill(high * limit), seen)

    def _new(self, edges: Indices, possible: NDArray[np.bool_], seen: list[Indices]) -> Candidates:
        """The possible cuts that were not met before."""
        for known in seen:
            possible = possible & (edges != known).any(axis=0)
        seen.append(edges)
        which = np.flatnonzero(possible)
        workers = self._workers[:, which]
        return Candidates(
            workers=workers,
            edges=edges[:, which],
            recomputes=np.zeros(workers.shape, dtype=np.bool_),
        )

    def _stage(self, s: int) -> _Stage:
        """All ranges for stage s; asked for once a pass."""
        if s in self._kept:
            return self._kept[s]
        made = self._make(s)
        if self._keeps:
            self._kept[s] = made
        return made

    def _make(self, s: int) -> _Stage:
        model, tables, workers = self._model, self._model.tables, self._workers
        own = workers[s]
        forward, backward = (
            table[own][:, None, :] - table[own][:, :, None]
            for table in (model.forward, model.backward)
        )
        send, send_delay = self._transfer(s, s + 1, tables.activation_bytes)
        back, _ = self._transfer(s, s - 1, tables.return_bytes)
        answer, answer_delay = self._transfer(s + 1, s, tables.return_bytes)
        compute = forward + backward
        free = (model.free_bytes[own] / self._setting.chunks)[:, None, None]
        fits = model.memory_table(self._held[s], recomputes=False)[None] <= free
        if self._setting.recomputes:
            again = model.memory_table(self._held[s], recomputes=True)[None] <= free
            compute = np.where(fits, compute, compute + forward)
            fits = fits | again
        uplink = send[:, None, :] + back[:, :, None]
        period = np.where(fits & self._proper, np.maximum(compute, uplink), np.inf)
        return _Stage(
            compute_s=compute,
            period_s=period,
            link_s=send + answer + (send_delay + answer_delay)[:, :, 0],
        )

    def _transfer(self, s: int, other: int, sizes: Floats) -> tuple[Floats, Floats]:
        """Uplink seconds from one stage to another for every cut, and the delay."""
        count = self._workers.shape[1]
        if not (0 <= other < len(self._workers) and 0 <= s < len(self._workers)):
            return np.zeros((count, len(sizes))), np.zeros((count, 1, 1))
        links, pair = self._model.links, (self._workers[s], self._workers[other])
        seconds = sizes[None, :] / links.bytes_per_s[pair][:, None]
        return seconds, links.delay_s[pair][:, None, None]

    def _longest_stages(self) -> Floats:
        """The smallest possible longest period of a stage, of every order."""
        best = np.full((self._workers.shape[1], self._model.tables.count + 1), np.inf)
        best[:, 0] = 0.0
        for s in range(len(self._workers)):
            period = self._stage(s).period_s
            best = np.maximum(best[:, :, None], period).min(axis=1)
        return best[:, -1]

    def _shortest_fill(self, limit_s: Floats) -> tuple[Indices, NDArray[np.bool_]]:
        """Cuts with the shortest fill among those with no longer period of a stage; where possible."""

        def total(stage: _Stage, following: Floats) -> Floats:
            return stage.compute_s + (stage.link_s + following)[:, None, :]

        return self._backwards(limit_s, total, np.full(len(limit_s), np.inf))

    def _in_time(self, period_s: Floats) -> tuple[Indices, NDArray[np.bool_]]:
        """Cuts for which no run of stages exceeds its time; where possible."""

        def total(stage: _Stage, following: Floats) -> Floats:
            late = np.maximum(0.0, stage.link_s + following)
            return stage.compute_s - period_s[:, None, None] + late[:, None, :]

        return self._backwards(period_s, total, 1e-12 * period_s)

    def _backwards(
        self, limit_s: Floats, total: Callable[[_Stage, Floats], Floats], most: Floats
    ) -> tuple[Indices, NDArray[np.bool_]]:
        """Edges with the smallest total, taken from the last stage to the first."""
        stages, count = self._workers.shape
        value = np.full((count, self._model.tables.count + 1), np.inf)
        value[:, -1] = 0.0
        ends = []
        for s in reversed(range(stages)):
            stage = self._stage(s)
            fits = np.isfinite(stage.period_s)
            fits &= stage.period_s <= limit_s[:, None, None] * (1 + 1e-12)
            found = np.where(fits, total(stage, value), np.inf)
            end = found.argmin(axis=2)
            smallest = found.min(axis=2)
            value = np.where(smallest <= most[:, None], smallest, np.inf)
            ends.append(end)
        every = np.arange(count)
        edges = np.zeros((stages + 1, count), dtype=np.intp)
        for s, end in enumerate(reversed(ends)):
            edges[s + 1] = end[every, edges[s]]
        return edges, np.isfinite(value[:, 0])

    def _period_of(self, edges: Indices) -> Floats:
        """The period that given cuts reach with many microbatches."""
        stages, count = self._workers.shape
        every = np.arange(count)
        runs = np.zeros((stages + 1, count))  # computation and links before each stage
        inner = np.zeros((stages, count))  # without the link of the last stage of a run
        longest = np.zeros(count)
        for s in range(stages):
            stage, low, high = self._stage(s), edges[s], edges[s + 1]
            inner[s] = runs[s] + stage.compute_s[every, low, high]
            runs[s + 1] = inner[s] + stage.link_s[every, high]
            longest = np.maximum(longest, stage.period_s[every, low, high])
        if self._setting.schedule != "1f1b":
            return longest
        for n in range(1, stages + 1):
            means = (inner[n - 1 :] - runs[: stages + 1 - n]) / n
            longest = np.maximum(longest, means.max(axis=0))
        return longest
