"""A new plan after a worker joined, was lost or drifted, if the change repays the move.

Candidates, from the smallest change to the largest: the current plan; the current cuts with spares in
the place of the lost workers; neighbours of the current order (a worker exchanged, added, left out, two
swapped) with new cuts; the best plan of all. With what `moves.py` says of each,

    cost = restart + move + horizon steps · step

and the lowest cost wins. The current plan restarts and moves nothing, and wins ties.

Not covered: what is lost by going back to a checkpoint, which is the same for every candidate that
changes anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import Final

import numpy as np

from fusion_dask.errors import PlanError
from fusion_dask.planner.chain import cuts_for
from fusion_dask.planner.cost_model import Candidates, CostModel
from fusion_dask.planner.evaluate import Best, Setting, best, evaluate, fitting
from fusion_dask.planner.links import LinkTable
from fusion_dask.planner.local import neighbours
from fusion_dask.planner.moves import Move, moves_between, moving_s
from fusion_dask.planner.pipelines import Found, placed
from fusion_dask.planner.placement import find_plan
from fusion_dask.planner.predict import predict
from fusion_dask.planner.records import (
    Capabilities,
    ModelCost,
    Objective,
    PlacedReplica,
    PoolPlan,
    PoolWorker,
    Workload,
)

__all__ = ["RESTART_S", "Replan", "replan"]

#: Ending a segment and starting the next one.
RESTART_S: Final = 5.0
#: Neighbours whose move is worked out, the fastest first.
NEIGHBOURS: Final = 40
#: Ways to fill the places of lost workers that are tried.
REPAIRS: Final = 5000

Replicas = tuple[PlacedReplica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """What to do.

    Attributes:
        plan: The plan to go on with.
        moves: What has to be fetched; empty where everything stays.
        move_s: How long that takes, restart included; 0 where nothing changes.
        gain_s: Seconds won over the horizon, the move deducted; 0 where nothing changes, None where
            the current plan cannot go on.
    """

    plan: PoolPlan
    moves: tuple[Move, ...]
    move_s: float
    gain_s: float | None


def replan(
    model: ModelCost,
    pool: Sequence[PoolWorker],
    current: Sequence[PlacedReplica],
    workload: Workload,
    *,
    horizon_steps: int,
    capabilities: Capabilities,
    restart_s: float = RESTART_S,
) -> Replan:
    """Decide whether and how to change a running plan, for throughput.

    Args:
        model: The model.
        pool: The workers that are there now, with their latest profiles; lost ones are not among
            them.
        current: The plan that runs, or ran until a worker was lost.
        workload: The work.
        horizon_steps: Steps for which the new plan is expected to last.
        capabilities: What the plan may ask for.
        restart_s: What a change costs before anything moves.

    Raises:
        PlanError: The model does not fit on what is left.
    """
    judge = _Judge(model, pool, tuple(current), workload, capabilities)
    options = [*judge.repaired(), *judge.neighbours()]
    stays = judge.plan(judge.current) if judge.can_go_on() else None
    try:
        options.append(find_plan(model, pool, workload, capabilities=capabilities).replicas)
    except PlanError:
        # What runs, or its repair, may hold where the search finds nothing.
        if stays is None and not options:
            raise
    changes = [judge.change(option, horizon_steps, restart_s) for option in options]
    change = min(changes, key=lambda c: c.cost_s, default=None)
    if stays is not None:
        cost_s = horizon_steps * stays.prediction.step_s
        if change is None or change.cost_s >= cost_s:
            return Replan(plan=stays, moves=(), move_s=0.0, gain_s=0.0)
        gain_s: float | None = cost_s - change.cost_s
    else:
        gain_s = None
    assert change is not None
    return Replan(plan=change.plan, moves=change.moves, move_s=change.move_s, gain_s=gain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    plan: PoolPlan
    moves: tuple[Move, ...]
    move_s: float
    cost_s: float


class _Judge:
    """Candidates, and what each would cost."""

    def __init__(
        self,
        model: ModelCost,
        pool: Sequence[PoolWorker],
        current: Replicas,
        workload: Workload,
        capabilities: Capabilities,
    ) -> None:
        self.current = current
        self._model = model
        self._pool = tuple(pool)
        self._workload = workload
        self._capabilities = capabilities
        self._place = {w.name: i for i, w in enumerate(pool)}
        self._links = LinkTable.of(pool)
        self._costs = {
            r.merge: CostModel(model, pool, workload, merge=r.merge, links=self._links)
            for r in current
        }

    def plan(self, replicas: Replicas) -> PoolPlan:
        """The replicas as a plan."""
        used = {s.worker for r in replicas for s in r.stages}
        return PoolPlan(
            replicas=replicas,
            backup=tuple(w.name for w in self._pool if w.name not in used),
            objective=Objective.THROUGHPUT,
            prediction=predict(
                self._model, self._pool, replicas, self._workload, links=self._links
            ),
        )

    def change(self, replicas: Replicas, horizon_steps: int, restart_s: float) -> _Change:
        """What going over to these replicas costs."""
        plan = self.plan(replicas)
        moves = moves_between(next(iter(self._costs.values())), self.current, replicas)
        move_s = restart_s + moving_s(moves)
        cost_s = move_s + horizon_steps * plan.prediction.step_s
        return _Change(plan=plan, moves=moves, move_s=move_s, cost_s=cost_s)

    def can_go_on(self) -> bool:
        """Nobody is lost, and everybody still has the memory."""
        return not self._lost() and all(self._repair(r, []) is not None for r in self.current)

    def repaired(self) -> Iterator[Replicas]:
        """The current cuts, with the best spares in the places of the lost workers."""
        if not self._lost():
            return
        used = {s.worker for r in self.current for s in r.stages}
        spares = [i for i, w in enumerate(self._pool) if w.name not in used]
        replicas = []
        for replica in self.current:
            repair = self._repair(replica, spares)
            if repair is None:
                return
            taken = {s.worker for s in repair.stages}
            spares = [i for i in spares if self._pool[i].name not in taken]
            replicas.append(repair)
        yield tuple(replicas)

    def neighbours(self) -> Iterator[Replicas]:
        """Single pipelines near the current one, with new cuts: the fastest of them."""
        if len(self.current) != 1 or self.current[0].chunks != 1:
            return
        (replica,) = self.current
        names = [s.worker for s in replica.stages]
        order = tuple(self._place[n] for n in names if n in self._place)
        if not order:
            return
        model, setting = self._costs[replica.merge], self._setting(replica)
        near = neighbours(model, order, range(len(self._pool)), setting, resize=True)
        found = []
        for orders in ([order], *near):
            if orders:
                cuts = cuts_for(model, np.array(orders, dtype=np.intp).T, setting)
                some = fitting(model, cuts, setting)
                step_s = evaluate(model, some, setting).step_s
                ranked = np.argsort(step_s, kind="stable")[:NEIGHBOURS]
                found += [
                    (float(step_s[i]), some.take(ranked[j : j + 1])) for j, i in enumerate(ranked)
                ]
        for step_s_, one in sorted(found, key=lambda f: f[0])[:NEIGHBOURS]:
            pipeline = Best(candidates=one, value=step_s_, step_s=step_s_)
            yield (self._placed(pipeline, replica),)

    def _lost(self) -> list[str]:
        return [s.worker for r in self.current for s in r.stages if s.worker not in self._place]

    def _setting(self, replica: PlacedReplica) -> Setting:
        return Setting(
            schedule=replica.schedule,
            chunks=replica.chunks,
            microbatches=replica.microbatches,
            objective=Objective.THROUGHPUT,
            recomputes=self._capabilities.recomputes,
        )

    def _repair(self, replica: PlacedReplica, spares: Sequence[int]) -> PlacedReplica | None:
        """The replica with the same cuts, on its own workers and some spares; None if none fits."""
        names = list(dict.fromkeys(s.worker for s in replica.stages))
        lost = [n for n in names if n not in self._place]
        columns = []
        for chosen in islice(permutations(spares, len(lost)), REPAIRS):
            known = self._place | dict(zip(lost, chosen, strict=True))
            columns.append([known[s.worker] for s in replica.stages])
        if not columns:
            return None
        workers = np.array(columns, dtype=np.intp).T
        edges = np.array([[0, *(s.stop for s in replica.stages)]], dtype=np.intp).T
        candidates = Candidates(
            workers=workers,
            edges=np.repeat(edges, workers.shape[1], axis=1),
            recomputes=np.zeros(workers.shape, dtype=np.bool_),
        )
        found = best(self._costs[replica.merge], candidates, self._setting(replica))
        return None if found is None else self._placed(found, replica)

    def _placed(self, pipeline: Best, like: PlacedReplica) -> PlacedReplica:
        found = Found(best=pipeline, setting=self._setting(like), merge=like.merge, members=())
        return placed(found, self._pool)
