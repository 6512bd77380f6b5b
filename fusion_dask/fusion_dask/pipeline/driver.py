"""The driver of a run: submits segments to the stages' workers and commits their checkpoints.

It runs where the flow runs. Per segment it tells the broker where the stages are, submits one pinned
Dask task per stage, listens to their steps, and when all parts of the checkpoint are written makes
it visible by one manifest. Between segments it holds nothing that the store does not hold.

A lost worker or a failed stage ends the segment with an error that names the cause; every other
stage is told at once, and the last checkpoint stands.
"""

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distributed import Client, Future, wait

from fusion_dask.broker.contribution import Load
from fusion_dask.broker.plugin import Broker
from fusion_dask.errors import ClusterError, NeighbourFailed, StageLost
from fusion_dask.pipeline.pool import ask
from fusion_dask.pipeline.spec import RunSpec, StageReport, StageResult, StageTask, StepMeasure
from fusion_dask.pipeline.stage_task import progress_topic, run_stage
from fusion_dask.worker.plugin import Onboard
from fusion_storage.checkpoint import Checkpoint, commit

__all__ = ["Driver", "Programs", "SegmentResult"]

Metadata = Callable[[Sequence[StepMeasure], float | None], Mapping[str, Any]]

#: How often the broker is asked whether a stage was lost while a segment runs.
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The serialised programs of every stage; `evaluation` is empty when nothing is held out."""

    training: tuple[bytes, ...]
    evaluation: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentResult:
    """What a segment achieved."""

    checkpoint: Checkpoint
    reports: tuple[StageReport, ...]
    steps: tuple[StepMeasure, ...]
    validation_loss: float | None


class Driver:
    """Runs the segments of one run on the stages' workers.

    Args:
        client: A client of the cluster.
        spec: What all stages share.
        programs: What each stage runs.
        addresses: The worker of each stage.
        on_step: Called with each step that ends, from another thread; for display, since a step
            may be told late or twice.
        load: What a step costs, for those who watch the pool.
    """

    def __init__(
        self,
        client: Client,
        spec: RunSpec,
        programs: Programs,
        addresses: Sequence[str],
        on_step: Callable[[StepMeasure], None],
        load: Load,
    ) -> None:
        self._client = client
        self._spec = spec
        self._programs = programs
        self._addresses = tuple(addresses)
        self._on_step = on_step
        self._load = load
        self._epoch = uuid.uuid1().time  # grows with every attempt, whoever starts it
        self._topic = progress_topic(spec.run)

    def __enter__(self) -> "Driver":
        """Install the engine on the cluster and place the stages."""
        self._client.register_plugin(Broker())
        self._client.register_plugin(Onboard())
        self._client.subscribe_topic(self._topic, self._event)
        addresses = {str(stage): a for stage, a in enumerate(self._addresses)}
        self._scheduler(
            "fusion_place",
            run=self._spec.run,
            epoch=self._epoch,
            addresses=addresses,
            load=asdict(self._load),
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Release the run's memory on every worker."""
        self._client.unsubscribe_topic(self._topic)
        self._broadcast("fusion_release")
        self._scheduler("fusion_release", run=self._spec.run)

    def segment(self, start: int, stop: int, metadata: Metadata) -> SegmentResult:
        """Train steps `start` to `stop` - 1, evaluate, and commit the checkpoint of step `stop`.

        Args:
            start: The step of the checkpoint to go on from, or 0.
            stop: The step of the checkpoint to make.
            metadata: Makes what the manifest records beside the tensors, of the segment's steps
                and its validation loss.

        Raises:
            StageLost: A worker left.
            StageError: A stage failed.
        """
        futures = [self._submit(stage, start, stop) for stage in range(len(self._addresses))]
        try:
            results = self._gather(futures)
        except BaseException as error:
            self._broadcast(
                "fusion_stop", epoch=self._epoch, stage=-1, reason=f"the run was stopped ({error})"
            )
            self._client.cancel(futures, force=True)
            raise
        losses = [r.validation_loss for r in results if r.validation_loss is not None]
        validation_loss = losses[0] if losses else None
        steps = tuple(measure for r in results for measure in r.steps)
        checkpoint = commit(
            self._spec.store,
            run=self._spec.run,
            step=stop,
            parts=[r.part for r in results],
            metadata=metadata(steps, validation_loss),
        )
        return SegmentResult(
            checkpoint=checkpoint,
            reports=tuple(r.report for r in results),
            steps=steps,
            validation_loss=validation_loss,
        )

    def _submit(self, stage: int, start: int, stop: int) -> "Future[StageResult]":
        evaluation = self._programs.evaluation
        task = StageTask(
            spec=self._spec,
            epoch=self._epoch,
            stage=stage,
            stages=len(self._addresses),
            start=start,
            stop=stop,
            program=self._programs.training[stage],
            evaluation=evaluation[stage] if evaluation else None,
        )
        return self._client.submit(
            run_stage,
            task,
            key=f"stage-{self._spec.run}-{self._epoch}-{start}-{stage}",
            workers=[self._addresses[stage]],
            allow_other_workers=False,
            pure=False,
        )

    def _gather(self, futures: Sequence["Future[StageResult]"]) -> list[StageResult]:
        pending = set(futures)
        while pending:
            done = self._wait(pending, POLL_S, "FIRST_COMPLETED")
            pending -= done
            failed = [f for f in done if f.status != "finished"]
            self._raise_lost()
            if failed:
                raise self._cause(futures)
        results: list[StageResult] = self._client.gather(list(futures))
        return results

    def _wait(
        self, futures: set["Future[StageResult]"], timeout_s: float, until: str
    ) -> set["Future[StageResult]"]:
        """The futures that have ended, after `timeout_s` at most."""
        # `wait` looks for the current client; the driver's need not be it.
        with contextlib.suppress(TimeoutError), self._client.as_current():
            wait(list(futures), timeout=timeout_s, return_when=until)
        return {f for f in futures if f.done()}

    def _raise_lost(self) -> None:
        lost = self._scheduler("fusion_lost", run=self._spec.run)
        for stage, reason in lost.items():
            raise StageLost(int(stage), reason)

    def _cause(self, futures: Sequence["Future[StageResult]"]) -> BaseException:
        """The first failure that is not the echo of another one."""
        if all(isinstance(e, NeighbourFailed) for e in _errors(futures)):
            # Only echoes so far: the stage that failed first is about to say why.
            self._wait(set(futures), POLL_S * 10, "ALL_COMPLETED")
            self._raise_lost()
        errors = _errors(futures)
        own = [e for e in errors if not isinstance(e, NeighbourFailed)]
        return (own or errors or [ClusterError("the segment was cancelled by the cluster")])[0]

    def _event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        _, message = event
        if message["epoch"] == self._epoch:
            self._on_step(StepMeasure(**message["measure"]))

    def _scheduler(self, operation: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        return ask(self._client, operation, **arguments)

    def _broadcast(self, operation: str, **arguments: object) -> None:
        """Call a handler on every worker that can be reached."""
        message = {"op": operation, "run": self._spec.run, **arguments}
        self._scheduler("broadcast", msg=message, on_error="ignore")


def _errors(futures: Sequence["Future[StageResult]"]) -> list[BaseException]:
    found: list[BaseException | None] = [f.exception() for f in futures if f.status == "error"]
    return [error for error in found if error is not None]
