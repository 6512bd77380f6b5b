"""What a given plan is expected to achieve, stage by stage.

The same formulas as in the search (`cost_model.py`, `timing.py`), for one plan, with the
synchronisation of replicas. A plan need not fit: its memory is reported, not checked.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.cost_model import IDLE_SHARE, Candidates, CostModel
from fusion_dask.planner.links import LinkTable
from fusion_dask.planner.records import (
    ModelCost,
    PlacedReplica,
    PoolWorker,
    Prediction,
    ReplicaPrediction,
    StagePrediction,
    Workload,
)
from fusion_dask.planner.schedule import held_at_peak
from fusion_dask.planner.timing import makespan_s

__all__ = ["candidates_of", "predict", "sync_seconds"]

Floats = NDArray[np.float64]


def predict(
    model: ModelCost,
    pool: Sequence[PoolWorker],
    replicas: Sequence[PlacedReplica],
    workload: Workload,
    *,
    links: LinkTable | None = None,
) -> Prediction:
    """Predict a step of a plan.

    Args:
        model: The model.
        pool: The workers; all that the plan names are among them.
        replicas: The plan.
        workload: The work.
        links: Those of the pool, where they are known already.

    Raises:
        ValueError: A replica does not cover every block once, or names a worker that is not in the
            pool.
    """
    links = LinkTable.of(pool) if links is None else links
    place = {w.name: i for i, w in enumerate(pool)}
    models = {
        merge: CostModel(model, pool, workload, merge=merge, links=links)
        for merge in sorted({r.merge for r in replicas})
    }
    parts = [_Part(models[r.merge], r, place) for r in replicas]
    pipeline_s = max(p.pipeline_s for p in parts)
    exchange_s = max(p.exchange_s for p in parts)
    update_s = max(p.update_s for p in parts)
    commit_s = max(p.commit_s for p in parts)
    sync_s = sync_seconds(parts[0].model, [p.candidates for p in parts])
    busy_s = pipeline_s + exchange_s + update_s + sync_s + commit_s
    journal_s = max(0.0, max(p.journal_s for p in parts) - busy_s)
    step_s = busy_s + journal_s
    tokens = model.tokens * sum(r.microbatches * r.merge for r in replicas)
    return Prediction(
        replicas=tuple(p.describe() for p in parts),
        pipeline_s=pipeline_s,
        exchange_s=exchange_s,
        update_s=update_s,
        sync_s=sync_s,
        commit_s=commit_s,
        journal_s=journal_s,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        latency_s=max(p.latency_s for p in parts),
        cost_per_token=sum(p.price_per_s for p in parts) * step_s / tokens,
        energy_j_per_token=sum(p.energy_j(step_s) for p in parts) / tokens,
    )


def candidates_of(replica: PlacedReplica, place: Mapping[str, int], blocks: int) -> Candidates:
    """A placed replica as a batch of one candidate.

    Raises:
        ValueError: It does not cover every block once, or names a worker that has no place.
    """
    edges = [0, *(s.stop for s in replica.stages)]
    if [s.start for s in replica.stages] != edges[:-1] or edges[-1] != blocks:
        raise ValueError("a replica's stages cover every block of the model once, in order")
    if unknown := [s.worker for s in replica.stages if s.worker not in place]:
        raise ValueError(f"the pool has no worker {unknown[0]}")
    return Candidates(
        workers=np.array([[place[s.worker]] for s in replica.stages]),
        edges=np.array([[e] for e in edges]),
        recomputes=np.array([[s.recomputes] for s in replica.stages]),
    )


def sync_seconds(model: CostModel, replicas: Sequence[Candidates]) -> float:
    """Ring all-reduce of the replicas, per step: the slowest worker's."""
    count = len(replicas)
    if count == 1:
        return 0.0
    blocks = model.tables.count
    holder = np.empty((count, blocks), dtype=np.intp)
    for row, candidates in zip(holder, replicas, strict=True):
        edges = candidates.edges[:, 0]
        row[:] = np.repeat(candidates.workers[:, 0], np.diff(edges))
    rounds = 2 * (count - 1)
    slowest = 0.0
    for worker in np.unique(holder):
        mine = (holder == worker).any(axis=0)
        peers = np.setdiff1d(holder[:, mine], [worker])
        rate = float(model.links.bytes_per_s[worker, peers].min())
        delay = float(model.links.delay_s[worker, peers].max())
        size = sum(
            b.gradient_bytes for b, m in zip(model.tables.model.blocks, mine, strict=True) if m
        )
        size += sum(t.gradient_bytes for t in model.tables.model.tied if mine[list(t.blocks)].any())
        slowest = max(slowest, rounds / count * size / rate + rounds * delay)
    return slowest / model.workload.sync_every_steps


class _Part:
    """One replica, evaluated."""

    def __init__(self, model: CostModel, replica: PlacedReplica, place: Mapping[str, int]) -> None:
        self.model = model
        self._replica = replica
        self.candidates = candidates_of(replica, place, model.tables.count)
        self._times = model.times(self.candidates)
        chunks, microbatches = replica.chunks, replica.microbatches
        self._workers = self.candidates.workers[: len(replica.stages) // chunks, 0]
        self._updates = model.update_s(self.candidates)[:, 0]
        self.pipeline_s = float(
            makespan_s(replica.schedule, microbatches, self._times, chunks=chunks)[0]
        )
        self.exchange_s = float(model.exchange_s(self.candidates)[0])
        self.update_s = float(self._per_worker(self._updates).max())
        self.commit_s = float(model.commit_s(self.candidates, chunks)[0])
        self.journal_s = float(model.journal_s(self.candidates, microbatches, chunks)[0])
        times = self._times
        self.latency_s = float((times.forward_s + times.send_s + times.send_delay_s).sum())
        self.price_per_s = float(model.price_per_s[self._workers].sum())

    def _per_worker(self, values: Floats) -> Floats:
        total: Floats = values.reshape(self._replica.chunks, -1).sum(axis=0)
        return total

    def _computing_s(self) -> Floats:
        """Of each worker in one step, updates aside."""
        each = (self._times.forward_s + self._times.backward_s)[:, 0]
        return self._replica.microbatches * self._per_worker(each)

    def energy_j(self, step_s: float) -> float:
        """Of one step."""
        busy = self._computing_s() + self._per_worker(self._updates)
        power = self.model.power_w[self._workers]
        return float((power * (IDLE_SHARE * step_s + (1 - IDLE_SHARE) * busy)).sum())

    def describe(self) -> ReplicaPrediction:
        replica, tables, times = self._replica, self.model.tables, self._times
        held = held_at_peak(
            replica.schedule, len(self._workers), replica.microbatches, replica.chunks
        )
        memory = self.model.memory_bytes(self.candidates, held)[:, 0]
        stages = []
        for i, stage in enumerate(replica.stages):
            crossing = tables.activation_bytes[stage.stop] + tables.return_bytes[stage.start]
            stages.append(
                StagePrediction(
                    worker=stage.worker,
                    forward_s=float(times.forward_s[i, 0]),
                    backward_s=float(times.backward_s[i, 0]),
                    send_s=float(times.send_s[i, 0] + times.return_s[i, 0]),
                    update_s=float(self._updates[i]),
                    memory_bytes=int(memory[i]),
                    state_bytes=int(tables.state_bytes[stage.start, stage.stop]),
                    sent_bytes=int(replica.microbatches * crossing),
                )
            )
        return ReplicaPrediction(
            stages=tuple(stages),
            pipeline_s=self.pipeline_s,
            bubble=1.0 - float(self._computing_s().mean()) / self.pipeline_s,
            latency_s=self.latency_s,
        )
