"""The plan: which stage runs what, where, and in which order.

A plan is data. It is stored with the run, so that a resumed run takes the same partition and reaches
the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_dask.errors import PlanError
from fusion_dask.graph.cut import boundary_bytes, cut, valid_positions
from fusion_dask.graph.ir import Graph, StageProgram
from fusion_dask.planner.partition import candidates, operator_seconds, partition

__all__ = ["Plan", "StagePlan", "make_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        worker: Name of its worker.
        operators: Operators that it computes.
        parameters: Parameters that it holds (numbers, not bytes).
        flops: Forward and backward FLOPs of one microbatch.
        sent_bytes: Activation bytes that it sends forward per microbatch.
    """

    worker: str
    operators: int
    parameters: int
    flops: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in pipeline order, and the cut positions in the training graph between them."""

    positions: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    microbatches: int
    schedule: str = "1f1b"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "positions": list(self.positions),
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "stages": [
                {
                    "worker": s.worker,
                    "operators": s.operators,
                    "parameters": s.parameters,
                    "flops": s.flops,
                    "sent_bytes": s.sent_bytes,
                }
                for s in self.stages
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        return cls(
            positions=tuple(data["positions"]),
            microbatches=data["microbatches"],
            schedule=data["schedule"],
            stages=tuple(StagePlan(**stage) for stage in data["stages"]),
        )


def make_plan(
    graph: Graph,
    workers: Sequence[str],
    *,
    stages: int | None,
    microbatches: int,
    positions: Sequence[int] | None = None,
) -> tuple[Plan, tuple[StageProgram, ...]]:
    """Cut a training graph over workers of equal speed.

    Args:
        graph: The training graph, with costs.
        workers: Names of the workers, in the order in which stages take them.
        stages: Number of stages; by default one per worker, as far as the graph can be cut.
        microbatches: Microbatches in a global batch.
        positions: Cut here instead of searching (a resumed run).

    Returns:
        The plan, and the programs of its stages.

    Raises:
        PlanError: More stages than workers, or than operators with parameters.
    """
    bytes_at = boundary_bytes(graph)
    useful = candidates(graph, bytes_at, frozenset(valid_positions(graph)))
    count = min(len(workers), len(useful) + 1) if stages is None else stages
    if positions is not None:
        count = len(positions) + 1
    if count > len(workers):
        raise PlanError(
            f"{count} stages need {count} workers, and the cluster has {len(workers)}: start more "
            f"(--workers {count}) or set stages={len(workers)}"
        )
    if positions is None:
        seconds = operator_seconds(graph)
        positions = partition(seconds, useful, bytes_at, [1.0] * count)
    programs = cut(graph, positions)
    described = tuple(
        StagePlan(
            worker=worker,
            operators=len(program.operators),
            parameters=sum(p.spec.numel for p in program.parameters),
            flops=program.flops,
            sent_bytes=sum(port.bytes for port in program.sends),
        )
        for worker, program in zip(workers, programs, strict=False)
    )
    plan = Plan(positions=tuple(positions), stages=described, microbatches=microbatches)
    return plan, programs
