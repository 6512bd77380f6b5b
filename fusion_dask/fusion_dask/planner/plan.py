"""The plan: which stage runs what, where, and in which order.

A plan is data. It is stored with the run, so that a resumed run takes the same partition and reaches
the same bits.

Where every worker was measured, the plan is the one that `placement.find_plan` expects to be the
fastest of those that the engine can run; it may leave workers out. Without measurements workers are
taken to be equal, and stages get equal FLOPs.

Invariant: of a plan over measured workers no stage program needs more memory than its worker has
free, by `graph.cost.stage_memory`, which is exact where the planner's tables estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from fusion_dask.errors import PlanError
from fusion_dask.graph.cost import stage_memory
from fusion_dask.graph.cut import boundary_bytes, cut, valid_positions
from fusion_dask.graph.ir import Graph, StageProgram
from fusion_dask.planner.model_cost import merged_at, model_cost
from fusion_dask.planner.partition import candidates, operator_seconds, partition
from fusion_dask.planner.placement import find_plan
from fusion_dask.planner.profile import Profile
from fusion_dask.planner.records import ENGINE, ModelCost, PoolPlan, PoolWorker, Workload
from fusion_dask.planner.schedule import in_flight

__all__ = ["Plan", "StagePlan", "make_plan"]

#: Plans that are tried before the memory of the stages is said not to fit.
ATTEMPTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        worker: Name of its worker.
        operators: Operators that it computes.
        parameters: Parameters that it holds (numbers, not bytes).
        flops: Forward and backward FLOPs of one microbatch.
        sent_bytes: Activation bytes that it sends forward per microbatch.
        memory_bytes: Its peak, where workers were measured.
    """

    worker: str
    operators: int
    parameters: int
    flops: int
    sent_bytes: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in pipeline order, and the cut positions in the training graph between them.

    `step_s` is the predicted time of a step, where workers were measured.
    """

    positions: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    microbatches: int
    schedule: str = "1f1b"
    step_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "positions": list(self.positions),
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "step_s": self.step_s,
            "stages": [asdict(s) for s in self.stages],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_json`.

        Raises:
            PlanError: It was written by another version.
        """
        try:
            return cls(
                positions=tuple(data["positions"]),
                microbatches=data["microbatches"],
                schedule=data["schedule"],
                step_s=data["step_s"],
                stages=tuple(StagePlan(**stage) for stage in data["stages"]),
            )
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"the recorded plan is of another version ({error}); resume the run with the version "
                "that made it"
            ) from None


def make_plan(
    graph: Graph,
    workers: Sequence[str],
    *,
    stages: int | None,
    microbatches: int,
    positions: Sequence[int] | None = None,
    profiles: Mapping[str, Profile] | None = None,
    dtype: str | None = None,
) -> tuple[Plan, tuple[StageProgram, ...]]:
    """Cut a training graph over workers.

    Args:
        graph: The training graph, with costs.
        workers: Names of the workers; equal ones take the stages in this order.
        stages: Number of stages; by default one per worker, as far as the graph can be cut, or as
            many as are fastest where the workers were measured.
        microbatches: Microbatches in a global batch.
        positions: Cut here instead of searching (a resumed run).
        profiles: What was measured, by worker. Workers are taken to be equal unless all of them were.
        dtype: Dtype of the matrix products under autocast, or None.

    Returns:
        The plan, and the programs of its stages.

    Raises:
        PlanError: More stages than workers, or than operators with parameters; or the model does not
            fit into the memory that was measured.
    """
    if positions is not None:
        stages = len(positions) + 1
    if stages is not None and stages > len(workers):
        raise PlanError(
            f"{stages} stages need {stages} workers, and the cluster has {len(workers)}: start more "
            f"(--workers {stages}) or set stages={len(workers)}"
        )
    if profiles is not None and workers and all(name in profiles for name in workers):
        pool = [PoolWorker(name=name, profile=profiles[name]) for name in workers]
        return _measured_plan(graph, pool, stages, microbatches, positions, dtype)
    if positions is None:
        positions = _equal_positions(graph, len(workers), stages)
    programs = cut(graph, positions)
    plan = Plan(
        positions=tuple(positions),
        stages=_describe(programs, workers),
        microbatches=microbatches,
    )
    return plan, programs


def _equal_positions(graph: Graph, workers: int, stages: int | None) -> tuple[int, ...]:
    """Cuts for equal workers."""
    bytes_at = boundary_bytes(graph)
    useful = candidates(graph, bytes_at, frozenset(valid_positions(graph)))
    count = min(workers, len(useful) + 1) if stages is None else stages
    return partition(operator_seconds(graph), useful, bytes_at, [1.0] * count)


def _describe(programs: Sequence[StageProgram], workers: Sequence[str]) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            worker=worker,
            operators=len(program.operators),
            parameters=sum(p.spec.numel for p in program.parameters),
            flops=program.flops,
            sent_bytes=sum(port.bytes for port in program.sends),
        )
        for worker, program in zip(workers, programs, strict=False)
    )


def _measured_plan(
    graph: Graph,
    pool: Sequence[PoolWorker],
    stages: int | None,
    microbatches: int,
    positions: Sequence[int] | None,
    dtype: str | None,
) -> tuple[Plan, tuple[StageProgram, ...]]:
    """The fastest plan whose stage programs fit, by their exact memory."""
    model = model_cost(graph, dtype=dtype)
    if positions is not None:
        model = _cut_at(model, positions)
    workload = Workload(microbatches=microbatches)
    free = {w.name: w.profile.free_memory_bytes for w in pool}
    for _ in range(ATTEMPTS):
        found = find_plan(model, pool, workload, capabilities=ENGINE, stages=stages)
        plan, programs = _executable(graph, model, found, workload)
        over = {
            s.worker: s.memory_bytes / free[s.worker]
            for s in plan.stages
            if s.memory_bytes is not None and s.memory_bytes > free[s.worker]
        }
        if not over:
            return plan, programs
        # The tables thought that it fits: for this worker they are too low by so much.
        pool = [_with_less(w, over.get(w.name, 1.0)) for w in pool]
    raise PlanError(
        f"no cut was found whose stages fit into the memory of {', '.join(sorted(over))}: take "
        "smaller microbatches, or add a worker with more memory"
    )


def _cut_at(model: ModelCost, positions: Sequence[int]) -> ModelCost:
    """The model in the stages of a run that is resumed."""
    if unknown := set(positions).difference(model.positions):
        raise PlanError(
            f"the recorded plan cuts at operator {min(unknown)}, where this capture of the model "
            "cannot be cut; resume with the version that made the run"
        )
    return merged_at(
        model, [0, *(model.positions.index(p) + 1 for p in positions), len(model.blocks)]
    )


def _executable(
    graph: Graph, model: ModelCost, found: PoolPlan, workload: Workload
) -> tuple[Plan, tuple[StageProgram, ...]]:
    """A plan of one pipeline in the words of the engine, with the exact memory of its stages."""
    (replica,) = found.replicas
    positions = tuple(model.positions[s.stop - 1] for s in replica.stages[:-1])
    programs = cut(graph, positions)
    memory = [
        stage_memory(
            program,
            microbatches_in_flight=in_flight(program.index, program.count, replica.microbatches),
            optimizer_bytes_per_parameter=workload.optimizer_bytes_per_parameter,
        ).total
        for program in programs
    ]
    described = _describe(programs, [s.worker for s in replica.stages])
    plan = Plan(
        positions=positions,
        stages=tuple(replace(s, memory_bytes=m) for s, m in zip(described, memory, strict=True)),
        microbatches=replica.microbatches,
        schedule=replica.schedule,
        step_s=found.prediction.step_s,
    )
    return plan, programs


def _with_less(worker: PoolWorker, factor: float) -> PoolWorker:
    room = int(worker.profile.free_memory_bytes / factor)
    return replace(worker, profile=replace(worker.profile, free_memory_bytes=room))
