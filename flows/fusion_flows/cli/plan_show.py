"""What `fusion plan` says: a table of stages, the parts of a step, what binds, what is missing.

Invariant: what is not known, such as a price, is shown as unknown and never as zero.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fusion_dask.errors import PlanError
from fusion_dask.planner.advice import Advice, Task, missing
from fusion_dask.planner.pool import Pool
from fusion_dask.planner.records import Objective, PlacedReplica, PoolPlan, PoolWorker
from fusion_flows.cli.errors import InputError

__all__ = ["check_priced", "devices_of", "find", "print_plan", "shape_of", "to_json"]

UNKNOWN: Final = "–"


def check_priced(pool: Pool, objective: Objective) -> None:
    """Raise InputError if costs are to be compared and a price is unknown."""
    if objective is Objective.COST and pool.unpriced:
        raise InputError(
            f"the price of {pool.unpriced[0]} is unknown: give --pool a file with price_per_hour, or "
            "take another --objective"
        )


def find(task: Task) -> PoolPlan:
    """The plan.

    Raises:
        InputError: Nothing fits; it says what is missing.
    """
    try:
        return task.plan()
    except PlanError as error:
        more = missing(task)
        enough = [f"{count} more {device}" for device, count in more.items() if count is not None]
        if enough:
            raise InputError(f"{error}. Enough would be {', or '.join(enough)}") from None
        raise InputError(f"{error}. More of {', '.join(more) or 'nothing'} will not do") from None


def devices_of(workers: tuple[PoolWorker, ...]) -> str:
    """The devices of a pool in words.

    >>> devices_of(())
    'nobody'
    """
    counts = Counter(w.profile.emulated or w.profile.device for w in workers)
    return ", ".join(f"{count} {device}" for device, count in counts.items()) or "nobody"


def shape_of(replicas: tuple[PlacedReplica, ...]) -> str:
    """Pipelines in words, such as `2 pipelines of 18 stages, 1f1b`."""
    kinds = Counter(_kind(r) for r in replicas)
    return "; ".join(
        f"{count} pipeline{'s' if count > 1 else ''} {kind}" for kind, count in kinds.items()
    )


def _kind(replica: PlacedReplica) -> str:
    again = sum(s.recomputes for s in replica.stages)
    size = f", {replica.merge} merged" if replica.merge > 1 else ""
    parts = f", {replica.chunks} stages a worker" if replica.chunks > 1 else ""
    return (
        f"of {len(replica.stages)} stages, {replica.schedule}{parts}, {replica.microbatches} "
        f"microbatches{size}" + (f", {again} recompute" if again else "")
    )


def print_plan(console: Console, task: Task, plan: PoolPlan, advice: Advice, pool: Pool) -> None:
    """Everything for a person."""
    console.print(f"{task.model.name} on {devices_of(task.pool)}: {shape_of(plan.replicas)}")
    for table in _stages(task, plan):
        console.print(table)
    prediction = plan.prediction
    parts = {
        "pipeline": prediction.pipeline_s,
        "exchange": prediction.exchange_s,
        "update": prediction.update_s,
        "replicas": prediction.sync_s,
    }
    said = ", ".join(f"{name} {value:.3g} s" for name, value in parts.items() if value > 0)
    bubble = max(r.bubble for r in prediction.replicas)
    console.print(
        f"step {prediction.step_s:.3g} s ({said}), {prediction.tokens_per_s:,.0f} tokens/s, "
        f"bubble {max(0.0, bubble):.0%}, latency {prediction.latency_s:.3g} s"
    )
    console.print(
        f"cost {_cost(plan, pool)} for a million tokens, energy "
        f"{_energy(task, prediction.energy_j_per_token)} a token"
    )
    if plan.backup:
        console.print(f"backup pool: {_few(plan.backup)}")
    _print_advice(console, advice)


def to_json(task: Task, plan: PoolPlan, advice: Advice, pool: Pool) -> dict[str, Any]:
    """Everything for a program; what is unknown is null."""
    prediction = asdict(plan.prediction)
    if _unpriced(plan, pool):
        prediction["cost_per_token"] = None
    return {
        "model": task.model.name,
        "dtype": task.model.dtype,
        "tokens_per_microbatch": task.model.tokens,
        "objective": plan.objective.value,
        "replicas": [asdict(r) for r in plan.replicas],
        "backup": list(plan.backup),
        "prediction": prediction,
        "advice": asdict(advice),
    }


def _stages(task: Task, plan: PoolPlan) -> list[Table]:
    room = {w.name: w.profile.free_memory_bytes for w in task.pool}
    tables = []
    for number, (placed, predicted) in enumerate(
        zip(plan.replicas, plan.prediction.replicas, strict=True)
    ):
        title = f"pipeline {number}" if len(plan.replicas) > 1 else None
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
        table.add_column("stage")
        table.add_column("worker", overflow="fold")
        table.add_column("begins with", overflow="fold")
        for name in (
            "blocks",
            "forward\n(ms)",
            "backward\n(ms)",
            "uplink\n(ms)",
            "memory\n(GB)",
            "free\n(GB)",
        ):
            table.add_column(name, justify="right")
        for i, (stage, times) in enumerate(zip(placed.stages, predicted.stages, strict=True)):
            mark = "*" if stage.recomputes else ""
            table.add_row(
                str(i),
                stage.worker,
                task.model.blocks[stage.start].name,
                f"{stage.stop - stage.start}{mark}",
                f"{times.forward_s * 1e3:,.1f}",
                f"{times.backward_s * 1e3:,.1f}",
                f"{times.send_s * 1e3:,.1f}",
                f"{times.memory_bytes / 1e9:.2f}",
                f"{room[stage.worker] / 1e9:.2f}",
            )
        if any(s.recomputes for s in placed.stages):
            table.caption = "* computes its activations again"
        tables.append(table)
    return tables


def _print_advice(console: Console, advice: Advice) -> None:
    gains = ", ".join(f"{name} {gain:+.0%}" for name, gain in advice.doubled.items())
    binds = "nothing of these" if advice.binds is None else f"the {advice.binds}"
    console.print(f"binds: {binds} (twice as much of each: {gains})")
    more = ", ".join(f"{device} {gain:+.0%}" for device, gain in advice.one_more.items())
    console.print(f"one more device: {more}")


def _few(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _unpriced(plan: PoolPlan, pool: Pool) -> bool:
    used = {s.worker for r in plan.replicas for s in r.stages}
    return bool(used & set(pool.unpriced))


def _cost(plan: PoolPlan, pool: Pool) -> str:
    if _unpriced(plan, pool):
        return UNKNOWN
    return f"${plan.prediction.cost_per_token * 1e6:.3g}"


def _energy(task: Task, joules: float) -> str:
    return f"{joules:.3g} J" if any(w.power_w for w in task.pool) else UNKNOWN
