"""What the planner reads and writes: the cost of a model, the pool, the work, the plan over the pool.

Covers: the records. Not covered: making a `ModelCost` (`model_cost.py` from a graph, `shapes.py` from
numbers), predicting times (`cost_model.py`), searching (`placement.py`).

Invariant: plain frozen data, no torch, no Dask. Everything that scales with the size of a microbatch
is kept apart from what does not (parameters).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from fusion_dask.planner.profile import Profile

__all__ = [
    "ANY",
    "ENGINE",
    "BlockCost",
    "Capabilities",
    "ModelCost",
    "Objective",
    "PlacedReplica",
    "PlacedStage",
    "PoolPlan",
    "PoolWorker",
    "Prediction",
    "ReplicaPrediction",
    "Schedule",
    "StagePrediction",
    "TiedParameter",
    "Workload",
]

Schedule = Literal["gpipe", "1f1b", "interleaved"]


class Objective(StrEnum):
    """What a plan minimises.

    THROUGHPUT: seconds per token. LATENCY: seconds of one microbatch's forward through the pipeline.
    COST: price per token of the workers that take part. ENERGY: joules per token.
    """

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    COST = "cost"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What lies between two neighbouring cut positions, for one microbatch.

    Attributes:
        name: For people, such as `h.3.mlp`.
        forward_flops: A multiply-add counts two.
        backward_flops: Of the gradients that are asked for.
        forward_bytes: Activations that a forward reads and writes in device memory.
        backward_bytes: The same of a backward.
        streamed_bytes: Parameters that a forward reads in full whatever the microbatch (not the table
            of a lookup).
        parameters: Trainable numbers. A tied parameter counts in `ModelCost.tied`, not here.
        parameter_bytes: Of all parameters, buffers and constants, frozen ones too; tied ones excluded.
        gradient_bytes: One gradient for each trainable parameter.
        saved_bytes: What one microbatch keeps from forward to backward.
        working_bytes: What a forward or backward needs on top while it runs.
    """

    name: str
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    streamed_bytes: float
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    saved_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several blocks read; every stage with one of them holds a copy of it."""

    name: str
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """A model as a chain of blocks, as far as the planner has to know it.

    Attributes:
        name: For people.
        dtype: Dtype of the matrix products, a key of `Profile.flops_per_s`.
        tokens: Tokens in one microbatch.
        blocks: In the order of the data flow.
        positions: Cut position in the graph between block i and i + 1; `len(blocks) - 1`, ascending.
        boundary_bytes: Activation bytes that cross there forward, per microbatch. What is used
            several stages later counts at each position that it crosses.
        gradient_boundary_bytes: Gradient bytes that cross there backward.
        tied: Parameters that several blocks read.
    """

    name: str
    dtype: str
    tokens: int
    blocks: tuple[BlockCost, ...]
    positions: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    gradient_boundary_bytes: tuple[int, ...]
    tied: tuple[TiedParameter, ...] = ()

    def __post_init__(self) -> None:
        """Check the lengths."""
        cuts = {
            len(self.positions),
            len(self.boundary_bytes),
            len(self.gradient_boundary_bytes),
        }
        if not self.blocks or cuts != {len(self.blocks) - 1}:
            raise ValueError("a model of n blocks has n - 1 cut positions and boundaries")

    @property
    def flops(self) -> float:
        """Forward and backward FLOPs of one microbatch."""
        return sum(b.forward_flops + b.backward_flops for b in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorker:
    """A worker as the planner sees it.

    Attributes:
        name: Its worker name; the links of its peers carry it.
        profile: What was measured on it, or what a data sheet says.
        price_per_hour: What an hour of it costs, in any currency; 0 where nobody pays.
        power_w: Board power while it computes.
    """

    name: str
    profile: Profile
    price_per_hour: float = 0.0
    power_w: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step has to do, whoever does it.

    Attributes:
        microbatches: Microbatches (of the size of the `ModelCost`) in a global batch, over all
            replicas.
        optimizer_bytes_per_parameter: 8 for Adam with float32 moments.
        optimizer_moved_bytes_per_parameter: Bytes that an update reads and writes: 28 for AdamW in
            float32 (reads parameter, gradient and two moments; writes all but the gradient).
        clips: Global gradient norms are exchanged before the update.
        sync_every_steps: Replicas synchronise every so many steps: 1 for plain data parallelism.
        checkpoint_every_steps: Steps in a segment; None leaves checkpoints out.
        journals: Boundary tensors are written to the store behind the computation.
    """

    microbatches: int
    optimizer_bytes_per_parameter: float = 8.0
    optimizer_moved_bytes_per_parameter: float = 28.0
    clips: bool = True
    sync_every_steps: int = 1
    checkpoint_every_steps: int | None = None
    journals: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a plan may ask for.

    Attributes:
        schedules: Schedules that can be run.
        chunks: Numbers of chunks per worker that interleaved 1F1B may use.
        merges: How many microbatches of the `ModelCost` may be merged into one.
        recomputes: Stages may recompute activations instead of keeping them.
        max_replicas: Most replicas.
    """

    schedules: tuple[Schedule, ...]
    chunks: tuple[int, ...]
    merges: tuple[int, ...]
    recomputes: bool
    max_replicas: int


#: What `pipeline/` runs today.
ENGINE: Final = Capabilities(
    schedules=("1f1b",), chunks=(), merges=(1,), recomputes=False, max_replicas=1
)
#: What the planner knows; for plans that are simulated.
ANY: Final = Capabilities(
    schedules=("1f1b", "gpipe", "interleaved"),
    chunks=(2, 4),
    merges=(1, 2, 4, 8),
    recomputes=True,
    max_replicas=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """One stage on one worker: blocks `start` to `stop` - 1."""

    worker: str
    start: int
    stop: int
    recomputes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedReplica:
    """One pipeline.

    Attributes:
        stages: In the order of the data flow. With interleaved 1F1B every worker appears `chunks`
            times: stage i is on the worker of stage i mod (len(stages) / chunks).
        schedule: The order of forwards and backwards.
        chunks: Stages per worker; 1 but for interleaved.
        microbatches: Its share of the global batch, in merged microbatches.
        merge: Microbatches of the `ModelCost` in one of them.
    """

    stages: tuple[PlacedStage, ...]
    schedule: Schedule
    chunks: int = 1
    microbatches: int
    merge: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """What a stage is expected to do in one step.

    Attributes:
        worker: Its worker.
        forward_s: Of one microbatch.
        backward_s: Of one microbatch, recomputation included.
        send_s: Its worker's uplink is busy so long with its boundary tensors of one microbatch,
            both directions.
        update_s: Of its optimizer.
        memory_bytes: Peak, of this stage alone.
        state_bytes: Parameters and optimizer state, what moves with it.
        sent_bytes: Boundary bytes per step, both directions.
    """

    worker: str
    forward_s: float
    backward_s: float
    send_s: float
    update_s: float
    memory_bytes: int
    state_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPrediction:
    """One pipeline in one step.

    Attributes:
        stages: As in the plan.
        pipeline_s: From the first forward to the last backward.
        bubble: Share of `pipeline_s` that its workers do not compute, on average.
        latency_s: Forward of one microbatch through all stages and links.
    """

    stages: tuple[StagePrediction, ...]
    pipeline_s: float
    bubble: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is expected to achieve. `step_s` is the sum of the parts that end in `_s`.

    Attributes:
        replicas: As in the plan.
        pipeline_s: The slowest replica's.
        exchange_s: Tied gradients and global norm.
        update_s: The slowest optimizer update.
        sync_s: Synchronisation of replicas, per step.
        commit_s: Checkpoint, per step.
        journal_s: What the journal needs beyond the step, because the store is too slow for it.
        step_s: One step.
        tokens_per_s: Of the whole plan.
        latency_s: The slowest replica's.
        cost_per_token: In the currency of the prices.
        energy_j_per_token: Joules.
    """

    replicas: tuple[ReplicaPrediction, ...]
    pipeline_s: float
    exchange_s: float
    update_s: float
    sync_s: float
    commit_s: float
    journal_s: float
    step_s: float
    tokens_per_s: float
    latency_s: float
    cost_per_token: float
    energy_j_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Who does what, and what comes of it.

    Attributes:
        replicas: Pipelines that share no worker.
        backup: Names of the workers that are left in the backup pool, in the order of the pool.
        objective: What was minimised.
        prediction: Its predicted times.
    """

    replicas: tuple[PlacedReplica, ...]
    backup: tuple[str, ...]
    objective: Objective
    prediction: Prediction
