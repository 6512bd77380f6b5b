"""Good cuts for given orders of workers: a dynamic programme over the prefixes of the blocks.

For an order of workers, stage after stage, over every block at which the stage may end:

1. the smallest possible period, where the period of a stage is the longer of its worker's computation
   and its uplink for one microbatch (min-max);
2. for a few limits from that period upwards, the cuts with the shortest fill (one microbatch there and
   back, links included) among those whose period stays within the limit (min-sum).

Several limits, since with few microbatches a longer period may pay for a shorter fill. Memory is a
hard limit per stage; a stage that does not fit recomputes, where that is allowed, and takes longer.
What comes out is a handful of candidates for each order; the exact evaluation chooses among them.

All orders of a call are treated at once. Chunks of one worker are separate stages here, each with its
share of the worker's memory: a heuristic, as is every choice of orders (`local.py`).
"""

from collections.abc import Iterator, Sequence
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

#: Accepted periods over the best one.
LIMITS: Final = (1.0, 1.05, 1.15, 1.35, 2.0, float("inf"))
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
        limits: Accepted periods over the best one.

    Returns:
        At most one candidate for each order and limit; none for an order that cannot hold the model.
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

    period_s: Floats  # infinite where it does not fit
    fill_s: Floats


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
        best = self._shortest_periods()
        possible = np.flatnonzero(np.isfinite(best))
        if len(possible) < len(best):
            self._workers, best = self._workers[:, possible], best[possible]
            self._kept.clear()
        yielded: list[Indices] = []
        for limit in limits:
            edges = self._cheapest(best * limit * (1 + 1e-12))
            if any(np.array_equal(edges, known) for known in yielded):
                continue
            yielded.append(edges)
            yield Candidates(
                workers=self._workers,
                edges=edges,
                recomputes=np.zeros(self._workers.shape, dtype=np.bool_),
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
        back, back_delay = self._transfer(s, s - 1, tables.return_bytes)
        compute = forward + backward
        free = (model.free_bytes[own] / self._setting.chunks)[:, None, None]
        fits = model.memory_table(self._held[s], recomputes=False)[None] <= free
        if self._setting.recomputes:
            again = model.memory_table(self._held[s], recomputes=True)[None] <= free
            compute = np.where(fits, compute, compute + forward)
            fits = fits | again
        uplink = send[:, None, :] + back[:, :, None]
        period = np.where(fits & self._proper, np.maximum(compute, uplink), np.inf)
        return _Stage(period_s=period, fill_s=compute + uplink + (send_delay + back_delay))

    def _transfer(self, s: int, other: int, sizes: Floats) -> tuple[Floats, Floats]:
        """Uplink seconds to another stage for every cut, and the delay."""
        count = self._workers.shape[1]
        if not 0 <= other < len(self._workers):
            return np.zeros((count, len(sizes))), np.zeros((count, 1, 1))
        links, pair = self._model.links, (self._workers[s], self._workers[other])
        seconds = sizes[None, :] / links.bytes_per_s[pair][:, None]
        return seconds, links.delay_s[pair][:, None, None]

    def _shortest_periods(self) -> Floats:
        """The smallest possible longest period of every order."""
        best = np.full((self._workers.shape[1], self._model.tables.count + 1), np.inf)
        best[:, 0] = 0.0
        for s in range(len(self._workers)):
            period = self._stage(s).period_s
            best = np.maximum(best[:, :, None], period).min(axis=1)
        return best[:, -1]

    def _cheapest(self, limit_s: Floats) -> Indices:
        """Edges with the shortest fill among those with no period above the limit."""
        count = self._workers.shape[1]
        blocks = self._model.tables.count
        best = np.full((count, blocks + 1), np.inf)
        best[:, 0] = 0.0
        origins = []
        for s in range(len(self._workers)):
            stage = self._stage(s)
            allowed = np.isfinite(stage.period_s) & (stage.period_s <= limit_s[:, None, None])
            total = np.where(allowed, best[:, :, None] + stage.fill_s, np.inf)
            origin = total.argmin(axis=1)
            best = np.take_along_axis(total, origin[:, None, :], axis=1)[:, 0]
            origins.append(origin)
        edges = np.empty((len(self._workers) + 1, count), dtype=np.intp)
        edges[-1] = blocks
        every = np.arange(count)
        for s in reversed(range(len(self._workers))):
            edges[s] = origins[s][every, edges[s + 1]]
        return edges
