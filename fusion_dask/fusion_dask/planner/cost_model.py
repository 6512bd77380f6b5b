"""What a plan costs: the formulas, and their evaluation for many candidates at once.

A candidate is an order of workers, the cuts between them and which stages recompute. All times are
seconds; f and b are one microbatch's forward and backward.

Operators. A block takes the longer of its arithmetic and its traffic (the roofline of Williams,
Waterman, Patterson, CACM 52(4), 2009):

    f = max(forward FLOPs / (rate · efficiency), (activation bytes + streamed parameters) / bandwidth)
    b = max(backward FLOPs / (rate · efficiency),
            (activation bytes + streamed parameters + 2 · gradient bytes) / bandwidth)

`rate` is the worker's measured rate of a large matrix product in the model's dtype (float32 where
that dtype was not measured), `efficiency` what real stages reached of it, and before the first one
`EFFICIENCY`, this project's assumption. A stage takes the sum of its blocks; one that recomputes
pays its forward again in its backward (Chen et al., arXiv 1604.06174).

Links. delay + bytes / rate per ordered pair (Hockney, Parallel Computing 20(3), 1994), see `links.py`.

Pipeline. The dependencies of the schedule, evaluated exactly: `timing.py` has the rules, the bubble
is what comes of them. Memory: `tables.py`.

End of the step, in the order in which the engine runs it:

    exchange = tied gradients: each holder sends its part to every other one
             + global norm: to the first stage and back, two delays of the farthest worker
    update   = slowest stage: trainable numbers · moved bytes per number / bandwidth

Replicas. Gradients (every step) or parameters (every H steps, DiLoCo, arXiv 2311.08105) are summed
around a ring (Patarasuk, Yuan, JPDC 69(2), 2009): per worker, with the slowest of its links to the
R - 1 workers that hold the same blocks,

    sync = (2 (R - 1) / R · bytes / rate + 2 (R - 1) · delay) / H

Checkpoint: slowest stage's state bytes / rate to the store, once in a segment, in front of the next
step. Journal: its bytes are written behind the computation, so it costs only what a stage's bytes
need beyond the step.

    step = pipeline + exchange + update + sync + commit + journal excess

Energy. Board power while computing; `IDLE_SHARE` of it while waiting. Price: every worker that takes
part is paid for the whole step.

Not covered: contention on a receiver's downlink, kernel launches, data loading.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.links import LinkTable
from fusion_dask.planner.profile import BROKER, STORE, Profile
from fusion_dask.planner.records import ModelCost, PoolWorker, Workload
from fusion_dask.planner.tables import Tables
from fusion_dask.planner.timing import StageTimes

__all__ = ["EFFICIENCY", "IDLE_SHARE", "Candidates", "CostModel", "block_seconds", "device_key"]

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

#: Share of the rate of a large matrix product that stages reach, until it is measured.
EFFICIENCY: Final = {"float32": 0.8, "bfloat16": 0.6, "float16": 0.6}
_OTHER_EFFICIENCY: Final = 0.6
#: Share of the board power that a waiting GPU draws; an assumption.
IDLE_SHARE: Final = 0.25


def block_seconds(model: ModelCost, profile: Profile, merge: int = 1) -> tuple[Floats, Floats]:
    """Forward and backward seconds of every block on one worker, for one merged microbatch."""
    return _roofline(_demands(model, merge), model, profile)


def _demands(model: ModelCost, merge: int) -> Floats:
    """Forward FLOPs and bytes, backward FLOPs and bytes, a column a block."""
    rows = [
        (
            b.forward_flops * merge,
            b.forward_bytes * merge + b.streamed_bytes,
            b.backward_flops * merge,
            b.backward_bytes * merge + b.streamed_bytes + 2 * b.gradient_bytes,
        )
        for b in model.blocks
    ]
    return np.array(rows).T


def _roofline(demands: Floats, model: ModelCost, profile: Profile) -> tuple[Floats, Floats]:
    efficiency = profile.efficiency or EFFICIENCY.get(model.dtype, _OTHER_EFFICIENCY)
    rate, bandwidth = _rate(model, profile) * efficiency, profile.memory_bytes_per_s
    forward: Floats = np.maximum(demands[0] / rate, demands[1] / bandwidth)
    backward: Floats = np.maximum(demands[2] / rate, demands[3] / bandwidth)
    return forward, backward


def device_key(worker: PoolWorker) -> tuple[object, ...]:
    """Equal for workers between which the cost model sees no difference but their peers' links."""
    profile = worker.profile
    return (
        tuple(sorted(profile.flops_per_s.items())),
        profile.efficiency,
        profile.memory_bytes_per_s,
        profile.free_memory_bytes,
        worker.price_per_hour,
        worker.power_w,
        _store_rate(worker),
    )


def _rate(model: ModelCost, profile: Profile) -> float:
    rates = profile.flops_per_s
    return rates.get(model.dtype) or rates.get("float32") or max(rates.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Plans of one pipeline with equally many stages; last axis: candidates.

    Attributes:
        workers: Place in the pool of the worker of each stage, (stages, N).
        edges: First block of each stage, and the number of blocks, (stages + 1, N).
        recomputes: (stages, N).
    """

    workers: Indices
    edges: Indices
    recomputes: NDArray[np.bool_]

    def take(self, which: Indices) -> "Candidates":
        """Some of them."""
        return Candidates(
            workers=self.workers[:, which],
            edges=self.edges[:, which],
            recomputes=self.recomputes[:, which],
        )


class CostModel:
    """A model on a pool. Arrays in, arrays out.

    Args:
        model: The model.
        pool: The workers; places in it are what `Candidates.workers` holds.
        workload: The work.
        merge: Microbatches of the model in one that is run.
        links: Those of the pool, where they are known already.
    """

    def __init__(
        self,
        model: ModelCost,
        pool: Sequence[PoolWorker],
        workload: Workload,
        *,
        merge: int = 1,
        links: LinkTable | None = None,
    ) -> None:
        self.pool = tuple(pool)
        self.workload = workload
        self.tables = Tables.of(model, workload, merge)
        self.links = LinkTable.of(pool) if links is None else links
        demands = _demands(model, merge)
        seconds = [_roofline(demands, model, w.profile) for w in pool]
        self.forward = np.array([_prefix(f) for f, _ in seconds])
        self.backward = np.array([_prefix(b) for _, b in seconds])
        self.free_bytes = np.array([float(w.profile.free_memory_bytes) for w in pool])
        self.bandwidth = np.array([w.profile.memory_bytes_per_s for w in pool])
        self.price_per_s = np.array([w.price_per_hour / 3600 for w in pool])
        self.power_w = np.array([w.power_w for w in pool])
        self.store_bytes_per_s = np.array([_store_rate(w) for w in pool])
        self._memory: dict[tuple[int, bool], Floats] = {}

    def memory_table(self, held: int, *, recomputes: bool) -> Floats:
        """`Tables.memory` or `Tables.memory_recomputing`, made once."""
        key = (held, recomputes)
        if key not in self._memory:
            tables = self.tables
            self._memory[key] = (
                tables.memory_recomputing(held) if recomputes else tables.memory(held)
            )
        return self._memory[key]

    def times(self, candidates: Candidates) -> StageTimes:
        """Seconds per microbatch of every stage."""
        workers, edges = candidates.workers, candidates.edges
        forward = self.forward[workers, edges[1:]] - self.forward[workers, edges[:-1]]
        backward = self.backward[workers, edges[1:]] - self.backward[workers, edges[:-1]]
        backward = backward + candidates.recomputes * forward
        following, previous = np.roll(workers, -1, axis=0), np.roll(workers, 1, axis=0)
        # The ends carry no bytes; their delay must not count either.
        inner = np.ones(workers.shape)
        has_next, has_previous = inner.copy(), inner.copy()
        has_next[-1] = 0.0
        has_previous[0] = 0.0
        rate, delay = self.links.bytes_per_s, self.links.delay_s
        return StageTimes(
            forward_s=forward,
            backward_s=backward,
            send_s=self.tables.activation_bytes[edges[1:]] / rate[workers, following],
            send_delay_s=delay[workers, following] * has_next,
            return_s=self.tables.return_bytes[edges[:-1]] / rate[workers, previous],
            return_delay_s=delay[workers, previous] * has_previous,
        )

    def memory_bytes(self, candidates: Candidates, held: Sequence[int]) -> Floats:
        """Peak memory of every stage, when stage i holds `held[i]` microbatches."""
        low, high = candidates.edges[:-1], candidates.edges[1:]
        tables, holds = self.tables, np.asarray(held)[:, None]
        received, sent = tables.activation_bytes[low], tables.activation_bytes[high]
        saved = tables.saved_bytes[low, high]
        kept = np.where(
            candidates.recomputes,
            holds * received + saved + sent,
            holds * (received + saved + sent),
        )
        total: Floats = tables.fixed_bytes[low, high] + kept + tables.working_bytes[low, high]
        return total

    def fits(
        self, candidates: Candidates, memory_bytes: Floats, chunks: int = 1
    ) -> NDArray[np.bool_]:
        """Whether no worker is asked for more than it has; chunks of a worker add up."""
        workers = candidates.workers.shape[0] // chunks
        need = memory_bytes.reshape(chunks, workers, -1).sum(axis=0)
        ok: NDArray[np.bool_] = (need <= self.free_bytes[candidates.workers[:workers]]).all(axis=0)
        return ok

    def exchange_s(self, candidates: Candidates) -> Floats:
        """Tied gradients and global norm."""
        workers, edges = candidates.workers, candidates.edges
        total = np.zeros(workers.shape[1])
        if self.workload.clips:
            first = workers[0]
            delay = self.links.delay_s
            total += (delay[workers, first] + delay[first, workers]).max(axis=0)
        for tied in self.tables.model.tied:
            # Stage of each block; of the blocks in one stage only the first counts.
            stages = np.array([(edges[1:] <= b).sum(axis=0) for b in tied.blocks])
            holders = np.take_along_axis(workers, stages, axis=0)
            fresh = np.ones(stages.shape, dtype=bool)
            fresh[1:] = stages[1:] != stages[:-1]
            total += self._spread_s(holders, fresh, float(tied.gradient_bytes))
        return total

    def _spread_s(self, holders: Indices, fresh: NDArray[np.bool_], size: float) -> Floats:
        """Until every holder has what every other one sent."""
        longest = np.zeros(holders.shape[1])
        for a in range(len(holders)):
            busy = np.zeros(holders.shape[1])
            delay = np.zeros(holders.shape[1])
            for b in range(len(holders)):
                counts = fresh[a] & fresh[b] & (a != b)
                busy += counts * (size / self.links.bytes_per_s[holders[a], holders[b]])
                delay = np.maximum(delay, counts * self.links.delay_s[holders[a], holders[b]])
            longest = np.maximum(longest, busy + delay)
        return longest

    def update_s(self, candidates: Candidates) -> Floats:
        """Seconds of each stage's optimizer update."""
        low, high = candidates.edges[:-1], candidates.edges[1:]
        moved = self.workload.optimizer_moved_bytes_per_parameter
        numbers = self.tables.parameters[low, high]
        seconds: Floats = numbers * moved / self.bandwidth[candidates.workers]
        return seconds

    def commit_s(self, candidates: Candidates, chunks: int = 1) -> Floats:
        """Seconds of a checkpoint, spread over the steps of a segment."""
        every = self.workload.checkpoint_every_steps
        if every is None:
            return np.zeros(candidates.workers.shape[1])
        low, high = candidates.edges[:-1], candidates.edges[1:]
        rate = self.store_bytes_per_s[candidates.workers]
        each = self.tables.state_bytes[low, high] / rate / every
        slowest: Floats = each.reshape(chunks, len(each) // chunks, -1).sum(axis=0).max(axis=0)
        return slowest

    def journal_s(self, candidates: Candidates, microbatches: int, chunks: int = 1) -> Floats:
        """Seconds that the slowest journal writer of a pipeline needs for one step."""
        if not self.workload.journals:
            return np.zeros(candidates.workers.shape[1])
        low, high = candidates.edges[:-1], candidates.edges[1:]
        sent = self.tables.activation_bytes[high] + self.tables.return_bytes[low]
        each = microbatches * sent / self.store_bytes_per_s[candidates.workers]
        slowest: Floats = each.reshape(chunks, len(each) // chunks, -1).sum(axis=0).max(axis=0)
        return slowest


def _prefix(values: Floats) -> Floats:
    total: Floats = np.concatenate([[0.0], np.cumsum(values)])
    return total


def _store_rate(worker: PoolWorker) -> float:
    """Bytes/s into the store: measured, else what the broker's link takes, else the disk."""
    profile = worker.profile
    for name in (STORE, BROKER):
        if name in profile.links:
            return profile.links[name].send_bytes_per_s
    return profile.disk_write_bytes_per_s or float("inf")
