"""What a plan is bound by, what one more device would bring, and what is missing where nothing fits.

Each answer is a plan for a changed pool. What binds is that of which twice as much helps most: the devices'
speed, the links (rates doubled, delays halved), or memory. A changed pool is also tried with the plan as it
is, so that a search that is unlucky never makes more look worse.

Invariant: a gain is never negative.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from fusion_dask.errors import PlanError
from fusion_dask.planner.placement import find_plan, score
from fusion_dask.planner.predict import predict
from fusion_dask.planner.profile import LinkProfile, Profile
from fusion_dask.planner.records import (
    Capabilities,
    ModelCost,
    Objective,
    PoolPlan,
    PoolWorker,
    Workload,
)

__all__ = ["Advice", "Task", "advise", "missing"]

#: Gains below this are noise of the search.
NOTICEABLE: Final = 0.01
#: Different devices of which one more is tried.
DEVICES: Final = 4
#: Most workers of a device that may be missing.
MOST_MISSING: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is planned."""

    model: ModelCost
    pool: tuple[PoolWorker, ...]
    workload: Workload
    objective: Objective
    capabilities: Capabilities

    def plan(self) -> PoolPlan:
        """The best plan.

        Raises:
            PlanError: Nothing fits.
        """
        return find_plan(
            self.model,
            self.pool,
            self.workload,
            objective=self.objective,
            capabilities=self.capabilities,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would help.

    Attributes:
        binds: `device`, `link` or `memory`; None where twice of none of them helps.
        doubled: Gain of twice as much of each: 0.5 is half as good again.
        one_more: Gain of one more worker like those of each device, by the device's name.
    """

    binds: str | None
    doubled: Mapping[str, float]
    one_more: Mapping[str, float]


def advise(task: Task, plan: PoolPlan) -> Advice:
    """What binds a plan, and what would be gained.

    Args:
        task: What was planned.
        plan: The plan that came of it.
    """
    doubled = {
        name: _gain(task, plan, tuple(change(w) for w in task.pool))
        for name, change in _DOUBLED.items()
    }
    most = max(doubled, key=lambda name: doubled[name])
    one_more = {
        device: _gain(task, plan, (*task.pool, replace(like, name=_new_name(task.pool))))
        for device, like in _devices(task.pool).items()
    }
    return Advice(
        binds=most if doubled[most] >= NOTICEABLE else None, doubled=doubled, one_more=one_more
    )


def missing(task: Task) -> Mapping[str, int | None]:
    """How many more workers of each device of the pool make the model fit.

    Args:
        task: What has no plan.

    Returns:
        By the device's name; None where none of its kind helps, however many.
    """
    return {device: _missing_of(task, like) for device, like in _devices(task.pool).items()}


def _gain(task: Task, plan: PoolPlan, pool: tuple[PoolWorker, ...]) -> float:
    changed = replace(task, pool=pool)
    before = score(plan.prediction, task.objective)
    as_it_is = predict(task.model, pool, plan.replicas, task.workload)
    after = min(before, score(as_it_is, task.objective))
    # The search may miss what the old plan shows to be possible.
    with suppress(PlanError):
        after = min(after, score(changed.plan().prediction, task.objective))
    return before / after - 1


def _missing_of(task: Task, like: PoolWorker) -> int | None:
    def fits(more: int) -> bool:
        new = [replace(like, name=f"one of {more} more: {i}") for i in range(more)]
        try:
            replace(task, pool=(*task.pool, *new)).plan()
        except PlanError:
            return False
        return True

    # A model has no more stages than blocks: more workers than that cannot help to fit it.
    limit = min(MOST_MISSING, len(task.model.blocks))
    high = 1
    while not fits(high):
        if high >= limit:
            return None
        high = min(2 * high, limit)
    low = high // 2  # does not fit, or is none
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _devices(pool: Sequence[PoolWorker]) -> dict[str, PoolWorker]:
    """One worker of each device, the commonest first."""
    found: dict[str, list[PoolWorker]] = {}
    for worker in pool:
        found.setdefault(worker.profile.emulated or worker.profile.device, []).append(worker)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    return {device: workers[0] for device, workers in ranked[:DEVICES]}


def _new_name(pool: Sequence[PoolWorker]) -> str:
    return max((w.name for w in pool), key=len) + " more"


def _with(worker: PoolWorker, change: Callable[[Profile], Profile]) -> PoolWorker:
    return replace(worker, profile=change(worker.profile))


def _faster(worker: PoolWorker) -> PoolWorker:
    return _with(
        worker,
        lambda p: replace(
            p,
            flops_per_s={dtype: 2 * rate for dtype, rate in p.flops_per_s.items()},
            memory_bytes_per_s=2 * p.memory_bytes_per_s,
        ),
    )


def _better_linked(worker: PoolWorker) -> PoolWorker:
    def twice(link: LinkProfile) -> LinkProfile:
        return LinkProfile(
            delay_s=link.delay_s / 2,
            send_bytes_per_s=2 * link.send_bytes_per_s,
            receive_bytes_per_s=2 * link.receive_bytes_per_s,
        )

    return _with(
        worker, lambda p: replace(p, links={name: twice(x) for name, x in p.links.items()})
    )


def _roomier(worker: PoolWorker) -> PoolWorker:
    return _with(worker, lambda p: replace(p, free_memory_bytes=2 * p.free_memory_bytes))


_DOUBLED: Final = {"device": _faster, "link": _better_linked, "memory": _roomier}
