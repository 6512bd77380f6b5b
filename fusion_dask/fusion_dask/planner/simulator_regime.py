"""A plan on a pool in the numbers that the simulator goes by, until the next worker is lost.

Covers: times of a step and of its parts, what a replacement has to fetch and replay, power, price and
bytes. Not covered: what happens when (`simulator.py`).

Invariant: a step without losses takes what `predict.predict` says.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fusion_dask.planner.cost_model import IDLE_SHARE, Candidates, CostModel
from fusion_dask.planner.links import LinkTable
from fusion_dask.planner.moves import moves_between, moving_s
from fusion_dask.planner.predict import candidates_of, predict
from fusion_dask.planner.records import ModelCost, PlacedReplica, PoolWorker, Workload
from fusion_dask.planner.simulator_step import Outage, StepRun, run_step
from fusion_dask.planner.timing import StageTimes

__all__ = ["Loss", "Market", "Regime"]

Replicas = tuple[PlacedReplica, ...]


class Market:
    """Everything that does not change while workers come and go.

    Args:
        model: The model.
        pool: Everybody who may ever take part.
        workload: The work.
    """

    def __init__(self, model: ModelCost, pool: Sequence[PoolWorker], workload: Workload) -> None:
        self.model = model
        self.pool = tuple(pool)
        # Once in a segment: the simulator knows itself when.
        self.workload = replace(workload, checkpoint_every_steps=None)
        self._checkpoint = replace(workload, checkpoint_every_steps=1)
        self.links = LinkTable.of(pool)
        self.place = {w.name: i for i, w in enumerate(pool)}
        self._costs: dict[int, CostModel] = {}

    def cost_model(self, merge: int) -> CostModel:
        """For microbatches that are merged like this."""
        if merge not in self._costs:
            self._costs[merge] = CostModel(
                self.model, self.pool, self._checkpoint, merge=merge, links=self.links
            )
        return self._costs[merge]

    def peak_flops_per_s(self, name: str) -> float:
        """What MFU is measured against: the worker's rate in the model's dtype, or in float32."""
        rates = self.pool[self.place[name]].profile.flops_per_s
        return rates.get(self.model.dtype) or rates.get("float32") or max(rates.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """A stage is lost within a step, and taken over.

    Attributes:
        lost: Who went.
        by: Who came.
        at_s: When, on the step's clock.
        ready_s: When the replacement is where the step began.
        replay_s: How long of that it computed.
        after: The plan with the replacement.
    """

    lost: str
    by: str
    at_s: float
    ready_s: float
    replay_s: float
    after: "Regime"


class Regime:
    """A plan in numbers.

    Attributes:
        replicas: The plan.
        prediction: What the planner expects of it.
        names: Who takes part.
        tokens: In a step.
        step_s: A step without losses, checkpoints aside.
        commit_s: A checkpoint.
        tail_s: What follows the pipeline in a step.
        memory_bytes: Peak by worker.
        sent_bytes: In a step, by sender and receiver.
        stored_bytes: Of a checkpoint.
        journal_bytes: Of a step.
        step_energy_j: Of a step.
        idle_w: Power of everybody while they wait.
        price_per_s: Of everybody.
        peak_flops_per_s: Of everybody.
    """

    def __init__(self, market: Market, replicas: Replicas) -> None:
        self.market = market
        self.replicas = replicas
        self.prediction = predict(
            market.model, market.pool, replicas, market.workload, links=market.links
        )
        self._parts = [candidates_of(r, market.place, len(market.model.blocks)) for r in replicas]
        self.names = frozenset(s.worker for r in replicas for s in r.stages)
        batch = sum(r.microbatches * r.merge for r in replicas)
        self.tokens = market.model.tokens * batch
        self.step_s = self.prediction.step_s
        self.tail_s = self.step_s - self.prediction.pipeline_s
        self.commit_s = max(
            float(cost.commit_s(c, r.chunks)[0]) for cost, c, r in self._with_costs()
        )
        self._sum_up()

    @property
    def step_flops(self) -> float:
        """FLOPs of the model in a step, without recomputation."""
        return self.market.model.flops * self.tokens / self.market.model.tokens

    def restore_s(self, names: Collection[str], before: Replicas = ()) -> float:
        """Until these workers have their state, from the store or who of `before` holds it.

        Args:
            names: Workers of this plan.
            before: The plan whose workers are still there; none by default.
        """
        merge = self.replicas[0].merge
        moves = moves_between(self.market.cost_model(merge), before, self.replicas)
        return moving_s([m for m in moves if m.worker in names])

    def replay_s(self, name: str, steps: int) -> float:
        """Until a worker has computed so many steps again from the journal, reading along."""
        rate = self._from_store_bytes_per_s(name)
        reads = sum(size for (_, receiver), size in self.sent_bytes.items() if receiver == name)
        return steps * max(self.computing_s[name], reads / rate)

    def replaced(self, lost: str, by: str) -> "Regime":
        """The plan with another worker in the place of a lost one."""
        return Regime(
            self.market,
            tuple(
                replace(
                    r,
                    stages=tuple(
                        replace(s, worker=by) if s.worker == lost else s for s in r.stages
                    ),
                )
                for r in self.replicas
            ),
        )

    def step(self, replica: int, losses: Sequence[Loss] = ()) -> StepRun:
        """One replica in one step that starts with this plan."""
        placed = self.replicas[replica]
        outages = []
        for loss in losses:
            hit, place = loss.after.where(loss.by)
            if hit == replica:
                outages.append(
                    Outage(
                        worker=place,
                        at_s=loss.at_s,
                        ready_s=loss.ready_s,
                        times=loss.after.times(replica),
                    )
                )
        return run_step(
            placed.schedule,
            placed.microbatches,
            self.times(replica),
            chunks=placed.chunks,
            outages=outages,
        )

    def disturbed_step_s(self, losses: Sequence[Loss]) -> float:
        """A step that starts with this plan and in which stages are lost."""
        hit = {loss.after.where(loss.by)[0] for loss in losses}
        last_s = max(self.step(replica, losses).end_s for replica in hit)
        return max(self.prediction.pipeline_s, last_s) + losses[-1].after.tail_s

    def places(self, replica: int) -> tuple[str, ...]:
        """Who is where in a replica's pipeline."""
        placed = self.replicas[replica]
        return tuple(s.worker for s in placed.stages[: len(placed.stages) // placed.chunks])

    def labels(self) -> dict[str, str]:
        """What each worker holds, for people: `stage 3`, or `stage 1/3` with several replicas."""
        held: dict[str, list[str]] = {}
        for r, replica in enumerate(self.replicas):
            for i, stage in enumerate(replica.stages):
                label = f"{r}/{i}" if len(self.replicas) > 1 else str(i)
                held.setdefault(stage.worker, []).append(label)
        return {name: "stage " + ", ".join(labels) for name, labels in held.items()}

    def times(self, replica: int) -> StageTimes:
        """Seconds per microbatch of the stages of a replica."""
        merge = self.replicas[replica].merge
        return self.market.cost_model(merge).times(self._parts[replica])

    def where(self, name: str) -> tuple[int, int]:
        """Replica and place in its pipeline."""
        for i in range(len(self.replicas)):
            if name in self.places(i):
                return i, self.places(i).index(name)
        raise ValueError(f"{name} has no stage")

    def best_for(self, lost: str, spares: Collection[str]) -> str | None:
        """Who of the spares has the memory for a lost worker's stages and is the fastest at them."""
        replica, _ = self.where(lost)
        cost = self.market.cost_model(self.replicas[replica].merge)
        mine = [s for s in self.replicas[replica].stages if s.worker == lost]

        def seconds(name: str) -> float:
            at = self.market.place[name]
            return sum(
                float(table[at, s.stop] - table[at, s.start])
                for table in (cost.forward, cost.backward)
                for s in mine
            )

        able = [
            n for n in spares if cost.free_bytes[self.market.place[n]] >= self.memory_bytes[lost]
        ]
        return min(able, key=lambda n: (seconds(n), self.market.place[n]), default=None)

    def _with_costs(self) -> list[tuple[CostModel, Candidates, PlacedReplica]]:
        return [
            (self.market.cost_model(r.merge), c, r)
            for c, r in zip(self._parts, self.replicas, strict=True)
        ]

    def _sum_up(self) -> None:
        """Everything that is a sum over workers."""
        memory: Counter[str] = Counter()
        computing: dict[str, float] = dict.fromkeys(self.names, 0.0)
        sent: Counter[tuple[str, str]] = Counter()
        self.stored_bytes = self.journal_bytes = 0.0
        for (cost, _, placed), predicted in zip(
            self._with_costs(), self.prediction.replicas, strict=True
        ):
            for stage in predicted.stages:
                memory[stage.worker] += stage.memory_bytes
                each_s = stage.forward_s + stage.backward_s
                computing[stage.worker] += placed.microbatches * each_s
                self.stored_bytes += stage.state_bytes
                self.journal_bytes += stage.sent_bytes * self.market.workload.journals
            for a, b in pairwise(placed.stages):
                there = cost.tables.activation_bytes[a.stop] * placed.microbatches
                back = cost.tables.return_bytes[b.start] * placed.microbatches
                sent[a.worker, b.worker] += int(there)
                sent[b.worker, a.worker] += int(back)
        self.memory_bytes: Mapping[str, int] = memory
        self.computing_s: Mapping[str, float] = computing
        self.sent_bytes: Mapping[tuple[str, str], int] = sent
        workers = [self.market.pool[self.market.place[n]] for n in sorted(self.names)]
        self.step_energy_j = self.prediction.energy_j_per_token * self.tokens
        self.idle_w = IDLE_SHARE * sum(w.power_w for w in workers)
        self.price_per_s = sum(w.price_per_hour for w in workers) / 3600
        self.peak_flops_per_s = sum(self.market.peak_flops_per_s(n) for n in self.names)

    def _from_store_bytes_per_s(self, name: str) -> float:
        links = self.market.pool[self.market.place[name]].profile.links
        known = links.get("store") or links.get("broker")
        return float("inf") if known is None else known.receive_bytes_per_s
