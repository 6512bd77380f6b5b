"""Plans for whoever is there, each made once.

A plan takes seconds to find, and a simulation meets the same combination of devices again and again.
Plans do not depend on names, so one that was made for equal workers is taken under their names.

Invariant: the same workers get the same plan.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fusion_dask.errors import PlanError
from fusion_dask.planner.cost_model import block_seconds, device_key
from fusion_dask.planner.records import PlacedReplica, PoolWorker
from fusion_dask.planner.simulator_records import Scenario

__all__ = ["Planner", "Plans"]

Replicas = tuple[PlacedReplica, ...]
#: From the workers that may take part to a plan; PlanError where there is none.
Planner = Callable[[Sequence[PoolWorker]], Replicas]


class Plans:
    """The plans of a scenario.

    Args:
        scenario: The pool, and how many workers are spared.
        planner: Makes them.
    """

    def __init__(self, scenario: Scenario, planner: Planner) -> None:
        self._planner = planner
        self._spare = scenario.spare
        names = {w.name for w in scenario.pool}
        ranked = sorted(scenario.pool, key=lambda w: _seconds(scenario, w))
        #: Fastest first, with what makes a worker equal to another one.
        self._ranked = [(w, _kind(w, names)) for w in ranked]
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], Replicas | str]] = {}

    def make(self, up: Collection[str]) -> Replicas:
        """For these workers, the slowest spared if that is possible.

        Raises:
            PlanError: The model does not fit on all of them.
        """
        there = [(w, kind) for w, kind in self._ranked if w.name in up]
        if self._spare and len(there) > self._spare:
            try:
                return self._made(there[: -self._spare])
            except PlanError:
                # Better no backup pool than no run.
                pass
        return self._made(there)

    def _made(self, there: Sequence[tuple[PoolWorker, str]]) -> Replicas:
        ordered = sorted(there, key=lambda pair: pair[1])
        key = tuple(kind for _, kind in ordered)
        names = tuple(w.name for w, _ in ordered)
        if key not in self._known:
            try:
                self._known[key] = (names, self._planner([w for w, _ in ordered]))
            except PlanError as error:
                self._known[key] = (names, str(error))
        then, found = self._known[key]
        if isinstance(found, str):
            raise PlanError(found)
        now = dict(zip(then, names, strict=True))
        return tuple(
            replace(r, stages=tuple(replace(s, worker=now[s.worker]) for s in r.stages))
            for r in found
        )


def _seconds(scenario: Scenario, worker: PoolWorker) -> float:
    forward, backward = block_seconds(scenario.model, worker.profile)
    return float(forward.sum() + backward.sum())


def _kind(worker: PoolWorker, names: Collection[str]) -> str:
    """Equal for workers that may be exchanged; of workers with links of their own no two are."""
    links = sorted(worker.profile.links.items())
    own = worker.name if any(name in names for name, _ in links) else ""
    return repr((device_key(worker), links, own))
