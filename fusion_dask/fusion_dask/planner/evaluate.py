"""The value of many candidate pipelines at once, and of the best of them.

`Setting` is what they have in common. A candidate that does not fit may be saved by recomputation
where that is allowed: a stage recomputes exactly if it does not fit otherwise, since recomputation
only costs time. `best` finds the best candidate by branch and bound over the whole batch: the bound
of `timing.lower_bound_s` first, the exact schedule only for those that could still win.

Invariant: of equal values the earlier candidate wins, so the same batch gives the same answer.
"""

from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.cost_model import IDLE_SHARE, Candidates, CostModel
from fusion_dask.planner.records import Objective, Schedule
from fusion_dask.planner.schedule import held_at_peak
from fusion_dask.planner.timing import StageTimes, lower_bound_s, makespan_s

__all__ = ["ACTIONS", "Best", "Setting", "Values", "best", "evaluate", "fitting"]

Floats = NDArray[np.float64]

#: Candidates whose schedule is evaluated at once, best bound first: a few to get an incumbent, then more.
BATCHES: Final = (8, 64, 512)
#: Actions (microbatches times stages) that a search evaluates exactly at once; about 20 ms.
ACTIONS: Final = 300_000
#: Bounds and values are sums in another order: equal up to this.
ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What candidate pipelines have in common.

    Attributes:
        schedule: Order of forwards and backwards.
        chunks: Stages per worker.
        microbatches: Merged microbatches in a step.
        objective: What is minimised.
        recomputes: Stages may recompute.
    """

    schedule: Schedule
    chunks: int
    microbatches: int
    objective: Objective
    recomputes: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """What comes of each candidate.

    Attributes:
        value: What is minimised, per step.
        step_s: Seconds of a step.
    """

    value: Floats
    step_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Best:
    """The best candidate of a batch; `candidates` holds it alone."""

    candidates: Candidates
    value: float
    step_s: float

    def beats(self, other: "Best | None") -> bool:
        """Strictly better, by more than rounding; of equal values the shorter step."""
        if other is None:
            return True
        if abs(self.value - other.value) > ROUNDING * abs(other.value):
            return self.value < other.value
        return self.step_s < other.step_s * (1 - ROUNDING)


def fitting(model: CostModel, candidates: Candidates, setting: Setting) -> Candidates:
    """Those that fit, recomputing where they have to and may."""
    workers = candidates.workers.shape[0] // setting.chunks
    held = held_at_peak(setting.schedule, workers, setting.microbatches, setting.chunks)
    memory = model.memory_bytes(candidates, held)
    if setting.recomputes:
        need = memory.reshape(setting.chunks, workers, -1).sum(axis=0)
        over = need > model.free_bytes[candidates.workers[:workers]]
        candidates = replace(candidates, recomputes=np.tile(over, (setting.chunks, 1)))
        memory = model.memory_bytes(candidates, held)
    return candidates.take(np.flatnonzero(model.fits(candidates, memory, setting.chunks)))


def evaluate(model: CostModel, candidates: Candidates, setting: Setting) -> Values:
    """The value of each candidate; they have to fit."""
    times = model.times(candidates)
    pipeline_s = makespan_s(setting.schedule, setting.microbatches, times, chunks=setting.chunks)
    return _values(model, candidates, setting, times, pipeline_s)


def best(
    model: CostModel,
    candidates: Candidates,
    setting: Setting,
    incumbent: Best | None = None,
    *,
    exact: bool = True,
) -> Best | None:
    """The best candidate that fits and beats the incumbent, else the incumbent.

    Args:
        model: The model on the pool.
        candidates: All of equally many stages.
        setting: What they have in common.
        incumbent: What has to be beaten.
        exact: Look at every candidate that could win; else at those with the best bounds only.
    """
    candidates = fitting(model, candidates, setting)
    times = model.times(candidates)
    workers = candidates.workers.shape[0] // setting.chunks
    held = held_at_peak(setting.schedule, workers, setting.microbatches, setting.chunks)
    bound_s = lower_bound_s(setting.microbatches, times, held, chunks=setting.chunks)
    bound = _values(model, candidates, setting, times, bound_s).value
    ranked = np.argsort(bound, kind="stable")
    if not exact:
        actions = setting.microbatches * len(candidates.workers)
        ranked = ranked[: max(16, ACTIONS // actions)]
    start = 0
    for size in chain(BATCHES, repeat(BATCHES[-1])):
        which = ranked[start : start + size]
        start += size
        if incumbent is not None:
            which = which[bound[which] <= incumbent.value * (1 + ROUNDING)]
        if not len(which):
            break
        some = candidates.take(which)
        values = evaluate(model, some, setting)
        # By value, then by step; the sort is stable.
        first = int(np.lexsort((values.step_s, values.value))[0])
        found = Best(
            candidates=some.take(np.array([first])),
            value=float(values.value[first]),
            step_s=float(values.step_s[first]),
        )
        if found.beats(incumbent):
            incumbent = found
    return incumbent


def _values(
    model: CostModel,
    candidates: Candidates,
    setting: Setting,
    times: StageTimes,
    pipeline_s: Floats,
) -> Values:
    workers = candidates.workers.shape[0] // setting.chunks
    on = candidates.workers[:workers]
    update = model.update_s(candidates).reshape(setting.chunks, workers, -1).sum(axis=0)
    step_s = pipeline_s + model.exchange_s(candidates) + update.max(axis=0)
    step_s = step_s + model.commit_s(candidates, setting.chunks)
    step_s = np.maximum(step_s, model.journal_s(candidates, setting.microbatches, setting.chunks))
    if setting.objective is Objective.THROUGHPUT:
        value = step_s
    elif setting.objective is Objective.LATENCY:
        value = (times.forward_s + times.send_s + times.send_delay_s).sum(axis=0)
    elif setting.objective is Objective.COST:
        value = model.price_per_s[on].sum(axis=0) * step_s
    else:
        each = (times.forward_s + times.backward_s).reshape(setting.chunks, workers, -1)
        busy = setting.microbatches * each.sum(axis=0) + update
        power = model.power_w[on]
        value = (power * (IDLE_SHARE * step_s + (1 - IDLE_SHARE) * busy)).sum(axis=0)
    return Values(value=value, step_s=step_s)
