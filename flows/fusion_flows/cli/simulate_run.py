"""From the options of `fusion simulate` to a scenario, and what came of it.

Invariant: equal options on an equal pool give equal results.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion_dask.errors import PlanError
from fusion_dask.planner.advice import Task
from fusion_dask.planner.churn import (
    Change,
    away_share,
    drawn_trace,
    parse_rate,
    trace_from_json,
)
from fusion_dask.planner.pool import Pool
from fusion_dask.planner.records import ANY, ENGINE, Objective, Workload
from fusion_dask.planner.simulator import simulate
from fusion_dask.planner.simulator_plans import Planner
from fusion_dask.planner.simulator_records import Scenario, Simulation
from fusion_flows.cli.plan_inputs import read_json, read_model, read_pool
from fusion_flows.cli.plan_show import find

__all__ = ["Asked", "Result", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options, in seconds where they are times."""

    model: str
    pool: str
    link: str | None
    churn: str
    away_s: float
    until_s: float
    checkpoint_s: float
    journal: bool
    spare: int | None
    microbatches: int
    batch: int
    context: int | None
    dtype: str
    runnable: bool
    seed: int
    cluster: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was asked, and what came of it.

    `scenario.spare` workers were kept back where that was possible.
    """

    asked: Asked
    pool: Pool
    scenario: Scenario
    simulation: Simulation

    @property
    def cost_per_million_tokens(self) -> float | None:
        """In US dollars; None where a price is unknown or nothing was computed."""
        used = {s.worker for r in self.simulation.replicas for s in r.stages}
        if used & set(self.pool.unpriced) or not self.simulation.tokens:
            return None
        return self.simulation.cost_per_million_tokens

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; what is unknown is null."""
        plain = self.simulation.to_json()
        plain["cost_per_million_tokens"] = self.cost_per_million_tokens
        if self.pool.unpriced:
            plain["cost"] = None
        asked = {name: getattr(self.asked, name) for name in Asked.__dataclass_fields__}
        return {"asked": asked | {"spare": self.scenario.spare}, **plain}


def run(asked: Asked) -> Result:
    """Simulate what was asked.

    Raises:
        InputError: The model, the pool or the trace cannot be read, or the model does not fit.
        FusionError: A part of them cannot be as it is given.
    """
    pool = read_pool(asked.pool, link=asked.link, cluster=asked.cluster)
    names = [w.name for w in pool.workers]
    trace, spare = _churn(asked, names)
    task = Task(
        model=read_model(asked.model, batch=asked.batch, context=asked.context, dtype=asked.dtype),
        pool=pool.workers,
        workload=Workload(microbatches=asked.microbatches, journals=asked.journal),
        objective=Objective.THROUGHPUT,
        capabilities=ENGINE if asked.runnable else ANY,
    )
    scenario = Scenario(
        model=task.model,
        pool=pool.workers,
        workload=task.workload,
        trace=trace,
        until_s=asked.until_s,
        checkpoint_s=asked.checkpoint_s,
        spare=min(spare, max(0, len(names) - 1)) if asked.spare is None else asked.spare,
    )
    try:
        simulation = simulate(scenario, _planner(task))
    except PlanError:
        # Once more for the whole pool, to say what is missing.
        find(task)
        raise
    return Result(asked=asked, pool=pool, scenario=scenario, simulation=simulation)


def _planner(task: Task) -> Planner:
    return lambda workers: replace(task, pool=tuple(workers)).plan().replicas


def _churn(asked: Asked, names: list[str]) -> tuple[tuple[Change, ...], int]:
    """Who leaves when, and how many are away on average."""
    if asked.churn.endswith(".json"):
        trace = trace_from_json(read_json(Path(asked.churn), "--churn"), names)
        return trace, _away_of(trace, len(names), asked.until_s)
    rate_per_s = parse_rate(asked.churn)
    trace = drawn_trace(
        names, rate_per_s, away_s=asked.away_s, until_s=asked.until_s, seed=asked.seed
    )
    return trace, math.ceil(len(names) * away_share(rate_per_s, asked.away_s))


def _away_of(trace: tuple[Change, ...], count: int, until_s: float) -> int:
    """Workers that are away in a recorded trace, on average, rounded up."""
    away: dict[str, float] = {}
    total_s = 0.0
    for change in trace:
        if change.joins:
            total_s += change.at_s - away.pop(change.worker, change.at_s)
        else:
            away.setdefault(change.worker, change.at_s)
    total_s += sum(max(0.0, until_s - since_s) for since_s in away.values())
    return min(count - 1, math.ceil(total_s / until_s)) if until_s else 0
