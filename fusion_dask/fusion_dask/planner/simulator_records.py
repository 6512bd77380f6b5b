"""What a simulation is asked and what it answers.

Invariant: plain frozen data; the parts of a `Budget` add up to the time that passed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fusion_dask.planner.churn import Change
from fusion_dask.planner.records import ModelCost, PlacedReplica, PoolWorker, Prediction, Workload
from fusion_dask.planner.simulator_step import StepRun

__all__ = ["Budget", "LinkTraffic", "Recovery", "Scenario", "Simulation", "Span", "StepPicture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a loss costs besides moving and computing.

    Attributes:
        detect_s: From the loss until the broker knows: the watchdog's patience.
        start_s: Until a program that has its state runs at full speed.
        replan_s: Planning anew, and handing the plan out.
    """

    detect_s: float = 5.0
    start_s: float = 2.0
    replan_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated.

    Attributes:
        model: The model.
        pool: Everybody who may ever take part; all are there at the start.
        workload: Its `checkpoint_every_steps` is not read: `checkpoint_s` says how often. With
            `journals` a lost stage is replayed alone, else all go back to the last checkpoint.
        trace: Who leaves and joins.
        until_s: How long.
        checkpoint_s: Time between two checkpoints, in whole steps, at least one.
        spare: Workers that a plan leaves in the backup pool if it can: the slowest ones.
        recovery: What a loss costs.
    """

    model: ModelCost
    pool: tuple[PoolWorker, ...]
    workload: Workload
    trace: tuple[Change, ...] = ()
    until_s: float
    checkpoint_s: float = 600.0
    spare: int = 0
    recovery: Recovery = Recovery()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Where the time went, in seconds.

    Attributes:
        steps_s: Steps that count.
        repeated_s: Steps that were lost, with what was computed before the loss.
        recovery_s: Waiting for replacements, restoring, moving.
        checkpoints_s: Writing them, as far as the computation waits.
        paused_s: What was left of the pool could not hold the model.
    """

    steps_s: float = 0.0
    repeated_s: float = 0.0
    recovery_s: float = 0.0
    checkpoints_s: float = 0.0
    paused_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Boundary tensors from one worker to another.

    Attributes:
        sender: Name.
        receiver: Name.
        total_bytes: In the steps that ran.
        step_bytes: In one step of the first plan; 0 where only a later one used the link.
        busy: Share of such a step that the link needs for them.
    """

    sender: str
    receiver: str
    total_bytes: float
    step_bytes: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a worker was from `start_s` to `stop_s`: `stage 3`, `restoring`, `backup` or `away`."""

    worker: str
    state: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """A step of the first pipeline, to draw: who the places are, and what happened.

    `at_s` is the start of the step in the simulation.
    """

    workers: tuple[str, ...]
    at_s: float
    run: StepRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What came of it.

    Attributes:
        elapsed_s: What was simulated, up to the end of the last whole step.
        steps: Steps that count.
        tokens: In these.
        tokens_per_s: Over all the time that passed.
        mfu: FLOPs of the model, without recomputation, over the peak rates of the workers in use.
        memory_bytes: Peak of each worker of the first plan.
        links: Busiest first.
        store_bytes: Checkpoints and journal.
        energy_j: Of the workers in use; the backup pool is not counted.
        cost: Of the workers in use, in the currency of the prices.
        budget: Where the time went.
        losses: Workers that were lost while they held a stage.
        replaced: Of these, those whose stage was taken over by the backup pool.
        replans: Plans made anew.
        replicas: The first plan.
        prediction: What the planner expects of it, without churn and checkpoints.
        spans: Who was what, and when.
        step: The first step.
        loss_step: The first step in which a worker was replaced.
    """

    elapsed_s: float
    steps: int
    tokens: int
    tokens_per_s: float
    mfu: float
    memory_bytes: Mapping[str, int]
    links: tuple[LinkTraffic, ...]
    store_bytes: float
    energy_j: float
    cost: float
    budget: Budget
    losses: int
    replaced: int
    replans: int
    replicas: tuple[PlacedReplica, ...]
    prediction: Prediction
    spans: tuple[Span, ...]
    step: StepPicture
    loss_step: StepPicture | None

    @property
    def bubble(self) -> float:
        """Share of the undisturbed pipeline that its workers do not compute; the worst replica's."""
        return max(r.bubble for r in self.prediction.replicas)

    @property
    def cost_per_million_tokens(self) -> float:
        """In the currency of the prices; infinite where nothing was computed."""
        return self.cost / self.tokens * 1e6 if self.tokens else float("inf")

    @property
    def energy_j_per_token(self) -> float:
        """Infinite where nothing was computed."""
        return self.energy_j / self.tokens if self.tokens else float("inf")

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        plain = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in {"step", "loss_step", "prediction", "budget"}
        }
        plain["memory_bytes"] = dict(self.memory_bytes)
        for name in ("links", "spans", "replicas"):
            plain[name] = [asdict(item) for item in plain[name]]
        return plain | {
            "bubble": self.bubble,
            "cost_per_million_tokens": self.cost_per_million_tokens if self.tokens else None,
            "energy_j_per_token": self.energy_j_per_token if self.tokens else None,
            "budget": asdict(self.budget),
            "prediction": asdict(self.prediction),
            "step": _picture(self.step),
            "loss_step": None if self.loss_step is None else _picture(self.loss_step),
        }


def _picture(picture: StepPicture) -> dict[str, Any]:
    return {
        "workers": list(picture.workers),
        "at_s": picture.at_s,
        "end_s": picture.run.end_s,
        "intervals": [i._asdict() for i in picture.run.intervals],
    }
