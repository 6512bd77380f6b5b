"""Which worker holds which stage: pure.

A stage stays where it is, or where the plan wants it, as long as that worker may take stages; another
stage gets the first worker that is free. When too few are left, a stage stays on a worker that was
asked to leave: the run ends there rather than stop.

Invariant: no two stages share a worker.
"""

from collections.abc import Mapping

from fusion_dask.errors import StageLost
from fusion_dask.planner.plan import Plan

__all__ = ["Placement", "place"]

#: Name and address of the worker of each stage.
Placement = tuple[tuple[str, str], ...]


def place(plan: Plan, usable: Mapping[str, str], current: Placement | None) -> Placement:
    """Give every stage a worker.

    Args:
        plan: Names the worker that each stage should have.
        usable: Name -> address of the workers that may take a stage, best first.
        current: Where the stages are, or None when none is placed.

    Raises:
        StageLost: There are fewer workers than stages, and no stage is placed.
    """
    wanted = [name for name, _ in current] if current else [s.worker for s in plan.stages]
    free = [name for name in usable if name not in wanted]
    placement: list[tuple[str, str]] = []
    for stage, name in enumerate(wanted):
        if name in usable:
            placement.append((name, usable[name]))
        elif free:
            name = free.pop(0)
            placement.append((name, usable[name]))
        elif current:
            placement.append(current[stage])
        else:
            raise StageLost(stage, f"worker {name} is gone, and no other one is free")
    return tuple(placement)
