"""The records that travel from the driver to the stage tasks and back."""

from dataclasses import dataclass

from fusion_dask.graph.ir import StageProgram
from fusion_dask.pipeline.runner import DataSource
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_storage.checkpoint import Part
from fusion_storage.store import Store

__all__ = ["RunSpec", "StageReport", "StageResult", "StageTask", "StepMeasure", "ownership"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What every stage of a run shares.

    Attributes:
        run: Name of the run.
        seed: Keys initialisation, order of the data and every random operator.
        store: Where checkpoints go.
        optimizer: The recipe.
        microbatches: Microbatches in a global batch.
        order: Trainable parameters in the model's order.
        owned: Per stage, the trainable parameters that it owns, in the model's order.
        autocast: Dtype of automatic mixed precision (`bfloat16`), or None.
        data: The training data.
        validation: The held-out data, or None.
        validation_microbatches: Microbatches of an evaluation.
        timeout_s: Longest wait for one boundary tensor.
    """

    run: str
    seed: int
    store: Store
    optimizer: OptimizerConfig
    microbatches: int
    order: tuple[str, ...]
    owned: tuple[tuple[str, ...], ...]
    autocast: str | None
    data: DataSource
    validation: DataSource | None = None
    validation_microbatches: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """One stage's work in one segment: steps `start` to `stop` - 1, then a checkpoint at `stop`."""

    spec: RunSpec
    epoch: int
    stage: int
    stages: int
    start: int
    stop: int
    program: bytes
    evaluation: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """Where a stage's time went in one segment."""

    stage: int
    worker: str
    wall_s: float
    computed_s: float
    waited_s: float
    saved_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """One step: mean loss of the global batch, global gradient norm before clipping, wall time."""

    step: int
    loss: float
    gradient_norm: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage task returns; steps and validation loss only where the loss is computed."""

    part: Part
    report: StageReport
    steps: tuple[StepMeasure, ...]
    validation_loss: float | None


def ownership(
    programs: tuple[StageProgram, ...], order: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Per stage, the trainable parameters whose owner it is, in the model's order.

    The owner of a tied parameter is the first stage that holds it.
    """
    position = {name: i for i, name in enumerate(order)}
    owned = []
    for program in programs:
        shared = dict(program.shared)
        names = [
            p.name
            for p in program.parameters
            if p.trainable and shared.get(p.name, (program.index,))[0] == program.index
        ]
        owned.append(tuple(sorted(names, key=position.__getitem__)))
    return tuple(owned)
