"""The Prefect task that trains: segment after segment, each ending in a checkpoint.

It holds nothing that the store does not hold: called again for the same run it goes on from the last
committed checkpoint. A worker that is lost costs the steps since then; the run goes on with the
workers that are left, as long as they are as many as the stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distributed import Client
from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from fusion_dask.broker.contribution import Load
from fusion_dask.errors import StageLost
from fusion_dask.pipeline.driver import Driver, SegmentResult
from fusion_dask.pipeline.pool import workers_of
from fusion_dask.pipeline.spec import RunSpec, StepMeasure
from fusion_dask.planner.plan import Plan
from fusion_dask.worker.optimizer import learning_rate
from fusion_storage.checkpoint import Checkpoint, collect, latest
from fusion_tasks.artifacts import artifact_key
from fusion_tasks.graphs import Planned
from fusion_tasks.placement import Placement, place
from fusion_tasks.records import StageReport, StepRecord, ValidationRecord

__all__ = ["TrainRequest", "Trained", "past_steps", "train"]

#: Losses of a worker that are survived without a new checkpoint in between.
RESTARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What to train, and how far.

    Attributes:
        cluster: Address of the Dask scheduler.
        spec: What all stages share.
        planned: Plan and programs.
        steps: The step to reach.
        checkpoint_every: Steps in a segment.
        keep: Checkpoints that are kept.
        tokens_per_step: Tokens in a global batch.
    """

    cluster: str
    spec: RunSpec
    planned: Planned
    steps: int
    checkpoint_every: int
    keep: int
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How the training went: the last checkpoint, and what was measured since the run began."""

    checkpoint: Checkpoint
    steps: tuple[StepRecord, ...]
    validations: tuple[ValidationRecord, ...]
    stages: tuple[StageReport, ...]


def past_steps(
    checkpoint: Checkpoint | None,
) -> tuple[tuple[StepRecord, ...], tuple[ValidationRecord, ...]]:
    """The history that a checkpoint carries."""
    if checkpoint is None:
        return (), ()
    history = checkpoint.metadata["history"]
    assert isinstance(history, Mapping)
    return (
        tuple(StepRecord(**r) for r in history["steps"]),
        tuple(ValidationRecord(**r) for r in history["validations"]),
    )


@task(cache_policy=NO_CACHE)
def train(request: TrainRequest, on_step: Callable[[StepRecord], None]) -> Trained:
    """Train until `request.steps`.

    Args:
        request: What to train.
        on_step: Called with each new step, for display; from another thread.

    Raises:
        StageLost: Workers were lost and too few are left, or again and again.
        StageError: A stage failed.
    """
    artifact = create_progress_artifact(
        progress=0.0,
        key=artifact_key(request.spec.run, "progress"),
        description="Training steps done",
    )

    def progressed(step: int) -> None:
        update_progress_artifact(artifact_id=artifact, progress=100.0 * step / request.steps)  # type: ignore[arg-type]

    with Client(request.cluster, name="fusion-driver") as client:
        return _Training(request, client, on_step, progressed).run()


class _Training:
    """The loop over segments and over losses of workers."""

    def __init__(
        self,
        request: TrainRequest,
        client: Client,
        on_step: Callable[[StepRecord], None],
        progressed: Callable[[int], None],
    ) -> None:
        self._request = request
        self._client = client
        self._show = on_step
        self._progressed = progressed
        self._stages: dict[int, StageReport] = {}
        self._logger = get_run_logger()

    def run(self) -> Trained:
        """Go on until the last step; every loss of a worker starts again from the checkpoint."""
        losses = 0
        reached = -1
        while True:
            checkpoint = latest(self._request.spec.store, self._request.spec.run)
            start = 0 if checkpoint is None else checkpoint.step
            losses = losses + 1 if start <= reached else 0
            reached = start
            try:
                return self._train(checkpoint)
            except StageLost as lost:
                left = len(workers_of(self._client))
                if losses >= RESTARTS or left < len(self._request.planned.plan.stages):
                    raise
                self._logger.warning("%s; going on from step %d with %d workers", lost, start, left)

    def _train(self, checkpoint: Checkpoint | None) -> Trained:
        """Train to the end, on other workers as soon as one has to leave and another is free."""
        placement = place(self._request.planned.plan, workers_of(self._client), None)
        while not self._is_done(checkpoint):
            checkpoint = self._attempt(checkpoint, placement)
            moved = place(self._request.planned.plan, workers_of(self._client, wait_s=0), placement)
            if moved != placement:
                self._logger.warning("a worker is taken back; its stage moves to another one")
            placement = moved
        steps, validations = past_steps(checkpoint)
        assert checkpoint is not None
        return Trained(
            checkpoint=checkpoint,
            steps=steps,
            validations=validations,
            stages=tuple(self._stages[s] for s in sorted(self._stages)),
        )

    def _attempt(self, checkpoint: Checkpoint | None, placement: Placement) -> Checkpoint:
        """Segment after segment, to the end or until the placement should change."""
        request = self._request
        plan = request.planned.plan
        load = Load(
            tokens_per_step=request.tokens_per_step, flops=tuple(s.flops for s in plan.stages)
        )
        addresses = [address for _, address in placement]
        with Driver(
            self._client, request.spec, request.planned.programs, addresses, self._on_step, load
        ) as driver:
            while True:
                start = 0 if checkpoint is None else checkpoint.step
                stop = min(start + request.checkpoint_every, request.steps)
                before = past_steps(checkpoint)
                result = driver.segment(start, stop, self._metadata(before, stop))
                checkpoint = result.checkpoint
                self._account(result, plan)
                collect(request.spec.store, request.spec.run, request.keep)
                self._progressed(stop)
                usable = workers_of(self._client, wait_s=0)
                if self._is_done(checkpoint) or place(plan, usable, placement) != placement:
                    return checkpoint

    def _is_done(self, checkpoint: Checkpoint | None) -> bool:
        return checkpoint is not None and checkpoint.step >= self._request.steps

    def _metadata(
        self, before: tuple[tuple[StepRecord, ...], tuple[ValidationRecord, ...]], stop: int
    ) -> Callable[[Sequence[StepMeasure], float | None], dict[str, Any]]:
        def make(measures: Sequence[StepMeasure], validation_loss: float | None) -> dict[str, Any]:
            steps, validations = before
            steps = (*steps, *map(self._record, measures))
            if validation_loss is not None:
                validations = (*validations, ValidationRecord(step=stop, loss=validation_loss))
            return {
                "validation_loss": validation_loss,
                "history": {
                    "steps": [asdict(r) for r in steps],
                    "validations": [asdict(r) for r in validations],
                },
            }

        return make

    def _record(self, measure: StepMeasure) -> StepRecord:
        return StepRecord(
            step=measure.step + 1,
            loss=measure.loss,
            grad_norm=measure.gradient_norm,
            learning_rate=learning_rate(self._request.spec.optimizer, measure.step),
            tokens=self._request.tokens_per_step,
            seconds=measure.seconds,
        )

    def _on_step(self, measure: StepMeasure) -> None:
        self._show(self._record(measure))

    def _account(self, result: SegmentResult, plan: Plan) -> None:
        """Add a segment's times to those of the segments before."""
        for report in result.reports:
            stage = plan.stages[report.stage]
            known = self._stages.get(report.stage)
            self._stages[report.stage] = StageReport(
                stage=report.stage,
                worker=report.worker,
                operators=stage.operators,
                parameters=stage.parameters,
                busy_s=report.computed_s + (known.busy_s if known else 0.0),
                wait_s=report.waited_s + (known.wait_s if known else 0.0),
                wall_s=report.wall_s + (known.wall_s if known else 0.0),
                sent_bytes=report.sent_bytes + (known.sent_bytes if known else 0),
            )
