"""The best single pipeline on some workers of a pool.

Small cases are exact: every size, order, cut, schedule and merge that the capabilities allow. Larger
ones are searched (`local.py`): sizes and merges from first guesses under one schedule, then steepest
descent from the best of them, then the other schedules and merges along the order found. A model of
very many blocks is searched with neighbouring blocks taken together, and cut finely at the end.

Solvers were considered: the exact time is max-plus in a schedule whose length is the number of
microbatches, and the order of workers makes it a quadratic assignment; a mixed-integer model of either
is far slower than this dynamic programme with enumeration, so none is used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from fusion_dask.planner.chain import LIMITS
from fusion_dask.planner.clusters import Clustering, cluster
from fusion_dask.planner.cost_model import CostModel
from fusion_dask.planner.evaluate import Best, Setting, best
from fusion_dask.planner.exhaustive import count, every, twins
from fusion_dask.planner.guesses import first_orders, short_orders
from fusion_dask.planner.links import LinkTable
from fusion_dask.planner.local import Effort, descend, shift_cuts, try_orders
from fusion_dask.planner.model_cost import merged_at
from fusion_dask.planner.records import (
    Capabilities,
    ModelCost,
    Objective,
    PlacedReplica,
    PlacedStage,
    PoolWorker,
    Schedule,
    Workload,
)
from fusion_dask.planner.schedule import can_run

__all__ = ["EFFORT", "Found", "PipelineSearch", "placed"]

#: Up to so many candidates everything is tried; about a second.
EXACT: Final = 1_000_000
#: Table elements that a search spends by default; a few seconds.
EFFORT: Final = 2e8
#: Blocks of a model that is searched as it is; with little effort.
FINE: Final = 96
COARSE: Final = 48
#: Largest share of a worker's memory that a block may fill where blocks are taken together.
GRAIN: Final = 0.1
#: Less effort than this is little.
QUICK: Final = 3e7
#: Effort for a pipeline like a known one.
LIKE: Final = 2e6
#: First guesses that are improved.
STARTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pipeline: the best one on these members."""

    best: Best
    setting: Setting
    merge: int
    members: tuple[int, ...]


class PipelineSearch:
    """Looks for the best pipeline of a model, on the workers that it is asked about.

    Args:
        model: The model.
        pool: All workers; `find` is told which of them may take part.
        workload: The work.
        objective: What is minimised.
        capabilities: What can be asked for.
        stages: Workers in the pipeline, or None to choose.
    """

    def __init__(
        self,
        model: ModelCost,
        pool: Sequence[PoolWorker],
        workload: Workload,
        objective: Objective,
        capabilities: Capabilities,
        stages: int | None,
    ) -> None:
        self.model = model
        self.pool = tuple(pool)
        self._workload = workload
        self._objective = objective
        self._capabilities = capabilities
        self._stages = stages
        self.links = LinkTable.of(pool)
        self._models: dict[tuple[int, int], CostModel] = {}

    def cost_model(self, merge: int, blocks: int | None = None) -> CostModel:
        """The cost model of a merge, with all blocks or about so many."""
        edges = None if blocks is None else self._coarse_edges(blocks)
        key = (merge, 0 if edges is None else len(edges))
        if key not in self._models:
            model = self.model if edges is None else merged_at(self.model, edges)
            self._models[key] = CostModel(
                model, self.pool, self._workload, merge=merge, links=self.links
            )
        return self._models[key]

    def clustering(self, members: Sequence[int]) -> Clustering:
        """The clusters of some workers, for this model's boundaries."""
        sizes = self.model.boundary_bytes
        return cluster(members, self.links, float(np.median(sizes)) if sizes else 0.0)

    def find(
        self, members: Sequence[int], microbatches: int, effort: float = EFFORT
    ) -> Found | None:
        """The best pipeline of some of the members, or None where nothing fits.

        Args:
            members: Places in the pool of the workers that may take part.
            microbatches: Microbatches of the model in a step.
            effort: Table elements to spend where not everything can be tried.
        """
        sizes = self._sizes(len(members))
        classes = _classes(members, self._twins) if len(members) <= len(self._twins) else None
        settings = list(self._settings(microbatches))
        if classes is not None:
            total = sum(
                count(len(self.model.blocks), classes, s.chunks, self._possible(sizes, s))
                for _, s in settings
            )
            if total <= EXACT:
                return self._everything(members, classes, sizes, settings)
        searched = self._search(members, sizes, settings, Effort(elements=effort))
        if effort < QUICK:
            settings = [(m, s) for m, s in settings if searched and m == searched[0].merge]
        shift = effort >= QUICK
        polished = [self.polish(f, settings, shift=shift) for f in searched[:2]]
        return min((p for p in polished if p is not None), key=_rank, default=None)

    def find_like(self, members: Sequence[int], microbatches: int, like: Found) -> Found | None:
        """A pipeline of about the length and with the schedule of another one; a matter of 50 ms."""
        merge = like.merge if microbatches % like.merge == 0 else 1
        setting = replace(like.setting, microbatches=microbatches // merge)
        near = len(_order(like.best, like.setting))
        sizes = [
            s
            for s in self._possible(self._sizes(len(members)), setting)
            if 0.7 * near <= s <= 1.4 * near or s == len(members)
        ]
        effort = Effort(elements=LIKE)
        blocks = self._blocks(effort)
        found = self._guesses(members, sizes, [(merge, setting)], blocks, effort)
        polished = (self.polish(f, [(merge, setting)], shift=False) for f in found[:STARTS])
        return next((p for p in polished if p is not None), None)

    def refit(self, found: Found, microbatches: int) -> Found | None:
        """The same pipeline with another number of merged microbatches, where it runs and fits."""
        setting = replace(found.setting, microbatches=microbatches)
        chosen = found.best.candidates
        workers = len(chosen.workers) // setting.chunks
        if microbatches < 1 or not can_run(setting.schedule, workers, microbatches, setting.chunks):
            return None
        again = best(self.cost_model(found.merge), chosen, setting)
        return None if again is None else replace(found, best=again, setting=setting)

    @cached_property
    def _twins(self) -> tuple[int, ...]:
        """Twins of a small pool; empty for a large one, where nothing can be exact."""
        return twins(self.pool, self.links) if len(self.pool) <= 64 else ()

    def _sizes(self, members: int) -> list[int]:
        most = min(members, len(self.model.blocks))
        if self._stages is None:
            return list(range(1, most + 1))
        return [self._stages] if self._stages <= most else []

    def _possible(self, sizes: Sequence[int], setting: Setting) -> list[int]:
        return [
            s
            for s in sizes
            if s * setting.chunks <= len(self.model.blocks)
            and can_run(setting.schedule, s, setting.microbatches, setting.chunks)
        ]

    def _settings(self, microbatches: int) -> Iterator[tuple[int, Setting]]:
        """Every merge and schedule, 1F1B first."""
        for merge in self._capabilities.merges:
            if microbatches % merge:
                continue
            for schedule, chunks in _schedules(self._capabilities):
                yield (
                    merge,
                    Setting(
                        schedule=schedule,
                        chunks=chunks,
                        microbatches=microbatches // merge,
                        objective=self._objective,
                        recomputes=self._capabilities.recomputes,
                    ),
                )

    def _everything(
        self,
        members: Sequence[int],
        classes: Sequence[int],
        sizes: Sequence[int],
        settings: Sequence[tuple[int, Setting]],
    ) -> Found | None:
        places = np.asarray(members, dtype=np.intp)
        winner: Found | None = None
        for merge, setting in settings:
            model = self.cost_model(merge)
            incumbent = winner.best if winner else None
            for size in self._possible(sizes, setting):
                for batch in every(model, setting.chunks, size, classes):
                    batch = replace(batch, workers=places[batch.workers])
                    found = best(model, batch, setting, incumbent)
                    if found is not incumbent and found is not None:
                        incumbent = found
                        winner = Found(
                            best=found, setting=setting, merge=merge, members=tuple(members)
                        )
        return winner

    def _search(
        self,
        members: Sequence[int],
        sizes: Sequence[int],
        settings: Sequence[tuple[int, Setting]],
        effort: Effort,
    ) -> list[Found]:
        """Pipelines from several starts, best first."""
        blocks = self._blocks(effort)
        many = STARTS if effort.elements >= QUICK else 1
        first = [(m, s) for m, s in settings if s.schedule == settings[0][1].schedule]
        starts = self._guesses(members, sizes, first, blocks, effort.part(0.4))[:many]
        found = []
        for i, start in enumerate(starts):
            better = descend(
                self.cost_model(start.merge, blocks),
                start.best,
                start.setting,
                members,
                effort.part(1 / (len(starts) - i)),
                resize=self._stages is None,
            )
            found.append(replace(start, best=better))
        return sorted(found, key=_rank)

    def _guesses(
        self,
        members: Sequence[int],
        sizes: Sequence[int],
        settings: Sequence[tuple[int, Setting]],
        blocks: int | None,
        effort: Effort,
    ) -> list[Found]:
        """The best first guess for every merge and size."""
        clustering = self.clustering(members)
        found = []
        for i, (merge, setting) in enumerate(settings):
            model = self.cost_model(merge, blocks)
            able = [s for s in self._possible(sizes, setting) if s <= model.tables.count]
            if not able:
                continue
            part = effort.part(1 / (len(settings) - i))
            known = short_orders(model, members, able) if part.elements >= QUICK / 10 else {}
            by_size = first_orders(model, clustering, setting, sorted({*able} - {*known}))
            for j, (size, orders) in enumerate(by_size.items()):
                some = part.part(1 / (len(by_size) - j)).pay(model, orders)
                known[size] = some or orders[:1]
            for orders in known.values():
                guess = try_orders(model, orders, setting, None)
                if guess is not None:
                    found.append(
                        Found(best=guess, setting=setting, merge=merge, members=tuple(members))
                    )
        # The best of every merge first: with more steps of the descent another one may win.
        ranked = sorted(found, key=_rank)
        heads = {f.merge: f for f in reversed(ranked)}
        return sorted(ranked, key=lambda f: (heads[f.merge] is not f, *_rank(f)))

    def polish(
        self, found: Found, settings: Sequence[tuple[int, Setting]], *, shift: bool = True
    ) -> Found | None:
        """The best of some schedules and merges along one order, over all blocks."""
        order = _order(found.best, found.setting)
        winner: Found | None = None
        for merge, setting in settings:
            if not self._possible([len(order)], setting):
                continue
            incumbent = winner.best if winner else None
            better = try_orders(self.cost_model(merge), [order], setting, incumbent, LIMITS)
            if better is not None and better is not incumbent:
                winner = replace(found, best=better, setting=setting, merge=merge)
        if winner is None or not shift:
            return winner
        shifted = shift_cuts(self.cost_model(winner.merge), winner.best, winner.setting)
        return replace(winner, best=shifted)

    def _blocks(self, effort: Effort) -> int | None:
        """Blocks to search with, or None for all of them."""
        most = COARSE if effort.elements < QUICK else FINE
        model = self.cost_model(1)
        block_bytes = float(model.tables.fixed_bytes[0, -1]) / most
        # Where a coarse block fills much of a worker, cuts have to be fine to fit at all.
        too_coarse = block_bytes > GRAIN * float(np.median(model.free_bytes))
        return None if len(self.model.blocks) <= most or too_coarse else most

    def _coarse_edges(self, blocks: int) -> list[int]:
        """About equal shares of the FLOPs, each ending at its cheapest boundary."""
        model = self.model
        flops = np.array([0.0, *(b.forward_flops + b.backward_flops for b in model.blocks)])
        share = np.cumsum(flops) / flops.sum()
        sizes = np.array([np.inf, *model.boundary_bytes, np.inf])
        edges = [0]
        for k in range(1, blocks):
            near = np.flatnonzero((share > (k - 0.5) / blocks) & (share <= (k + 0.5) / blocks))
            near = near[(near > edges[-1]) & (near < len(model.blocks))]
            if len(near):
                edges.append(int(near[sizes[near].argmin()]))
        return [*edges, len(model.blocks)]


def placed(found: Found, pool: Sequence[PoolWorker]) -> PlacedReplica:
    """A pipeline in the words of a plan."""
    chosen = found.best.candidates
    edges = chosen.edges[:, 0]
    return PlacedReplica(
        stages=tuple(
            PlacedStage(
                worker=pool[int(w)].name,
                start=int(edges[i]),
                stop=int(edges[i + 1]),
                recomputes=bool(chosen.recomputes[i, 0]),
            )
            for i, w in enumerate(chosen.workers[:, 0])
        ),
        schedule=found.setting.schedule,
        chunks=found.setting.chunks,
        microbatches=found.setting.microbatches,
        merge=found.merge,
    )


def _order(found: Best, setting: Setting) -> tuple[int, ...]:
    workers = found.candidates.workers[:, 0]
    return tuple(int(w) for w in workers[: len(workers) // setting.chunks])


def _schedules(capabilities: Capabilities) -> Iterator[tuple[Schedule, int]]:
    for schedule in capabilities.schedules:
        if schedule == "interleaved":
            for chunks in capabilities.chunks:
                yield schedule, chunks
        else:
            yield schedule, 1


def _classes(members: Sequence[int], heads: Sequence[int]) -> list[int]:
    """Twins among the members, numbered by their places among the members."""
    first: dict[int, int] = {}
    return [first.setdefault(heads[m], i) for i, m in enumerate(members)]


def _rank(found: Found) -> tuple[float, float]:
    return found.best.value, found.best.step_s
