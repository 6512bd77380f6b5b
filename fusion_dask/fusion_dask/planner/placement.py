"""The plan of a model over a pool: who takes part, in which order, with which part of the model.

Covers: one pipeline (`pipelines.py`) against several side by side (`replicas.py`), and what to say
when nothing fits. Workers that would slow the rest down stay in the backup pool.

Exact for one pipeline of a small model on a small pool; else a search whose effort is counted, not
timed. Pure and deterministic: names are never compared, so a renamed pool gets the renamed plan.

Invariants of what comes out: every replica covers every block once, in the order of the data flow; no
worker serves twice; no worker is asked for more memory than its profile says is free.
"""

from collections.abc import Sequence

from fusion_dask.errors import PlanError
from fusion_dask.planner.pipelines import EFFORT, Found, PipelineSearch, placed
from fusion_dask.planner.predict import predict
from fusion_dask.planner.records import (
    ANY,
    Capabilities,
    ModelCost,
    Objective,
    PoolPlan,
    PoolWorker,
    Prediction,
    Workload,
)
from fusion_dask.planner.replicas import best_side_by_side

__all__ = ["find_plan", "score"]


def score(prediction: Prediction, objective: Objective) -> float:
    """What the objective minimises, of a predicted plan."""
    return {
        Objective.THROUGHPUT: prediction.step_s,
        Objective.LATENCY: prediction.latency_s,
        Objective.COST: prediction.cost_per_token,
        Objective.ENERGY: prediction.energy_j_per_token,
    }[objective]


def find_plan(
    model: ModelCost,
    pool: Sequence[PoolWorker],
    workload: Workload,
    *,
    objective: Objective = Objective.THROUGHPUT,
    capabilities: Capabilities = ANY,
    stages: int | None = None,
    effort: float = EFFORT,
) -> PoolPlan:
    """Plan a model over a pool.

    Args:
        model: The model.
        pool: The workers that may take part.
        workload: What a step has to do.
        objective: What is minimised.
        capabilities: What the plan may ask for: `ENGINE` for one that is to be run.
        stages: Workers in a pipeline; by default the planner chooses.
        effort: Table elements that the search spends where it cannot try everything; the default
            takes some seconds.

    Raises:
        PlanError: The pool is empty, or the model does not fit on it.
    """
    if not pool:
        raise PlanError("the pool has no worker; lend one with `fusion join`")
    if len({w.name for w in pool}) < len(pool):
        raise ValueError("the workers of a pool have different names")
    search = PipelineSearch(model, pool, workload, objective, capabilities, stages)
    members = range(len(pool))
    plans = []
    most = min(capabilities.max_replicas, workload.microbatches, len(pool))
    side_by_side = most > 1 and objective is not Objective.LATENCY
    share = effort / 2 if side_by_side else effort
    single = search.find(members, workload.microbatches, share)
    if single is not None:
        plans.append(_plan(search, [single], workload, objective))
    if side_by_side:
        several = best_side_by_side(
            search,
            members,
            workload.microbatches,
            most,
            share,
            lambda found: score(_plan(search, found, workload, objective).prediction, objective),
        )
        if several is not None:
            plans.append(_plan(search, several, workload, objective))
    if not plans:
        raise PlanError(_what_is_missing(search, stages))
    return min(plans, key=lambda plan: score(plan.prediction, objective))


def _plan(
    search: PipelineSearch, found: Sequence[Found], workload: Workload, objective: Objective
) -> PoolPlan:
    replicas = tuple(placed(f, search.pool) for f in found)
    used = {s.worker for r in replicas for s in r.stages}
    return PoolPlan(
        replicas=replicas,
        backup=tuple(w.name for w in search.pool if w.name not in used),
        objective=objective,
        prediction=predict(search.model, search.pool, replicas, workload, links=search.links),
    )


def _what_is_missing(search: PipelineSearch, stages: int | None) -> str:
    blocks = len(search.model.blocks)
    if stages is not None and stages > min(blocks, len(search.pool)):
        return (
            f"{stages} stages were asked for, but there are {len(search.pool)} workers and the "
            f"model can be cut into at most {blocks} stages; ask for fewer"
        )
    model = search.cost_model(1)
    need = float(model.tables.fixed_bytes[0, -1] + model.tables.kept()[0, -1])
    have = float(model.free_bytes.sum())
    if need > have:
        return (
            f"{search.model.name} needs at least {need / 1e9:.2f} GB for parameters, gradients, "
            f"optimizer and one microbatch, and the pool has {have / 1e9:.2f} GB free: add workers "
            f"with {(need - have) / 1e9:.2f} GB, or take a smaller microbatch"
        )
    return (
        f"{search.model.name} needs {need / 1e9:.2f} GB and the pool has {have / 1e9:.2f} GB free, "
        f"but no way was found to cut it so that every stage fits into its worker's memory with all "
        f"its microbatches in flight (largest worker: {model.free_bytes.max() / 1e9:.2f} GB): take "
        f"smaller microbatches, or add a worker with more memory"
    )
