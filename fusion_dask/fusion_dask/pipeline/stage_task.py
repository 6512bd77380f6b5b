"""The Dask task of one stage and one segment: a thin driver of the stage host.

It finds the stage resident on the worker, or restores it: from the checkpoint at the segment's start,
or, at step 0, by the initialisation that is seeded per parameter name. So it may be run again, on any
worker, with the same result. Whatever stops it is told to the neighbours that wait for it.
"""

import dataclasses
import hashlib
import time
import uuid
from dataclasses import dataclass

import torch
from distributed import Worker, get_worker

from fusion_dask.broker.plugin import PROGRESS
from fusion_dask.errors import NeighbourFailed, StageError
from fusion_dask.graph.initialise import initialise
from fusion_dask.graph.programs import loads_program
from fusion_dask.pipeline.dask_exchange import DaskExchange
from fusion_dask.pipeline.runner import RunnerConfig, StageRunner, StepResult
from fusion_dask.pipeline.spec import StageReport, StageResult, StageTask, StepMeasure
from fusion_dask.planes.torch_plane import TorchPlane
from fusion_dask.planner.schedule import one_f_one_b
from fusion_dask.worker.memory import is_out_of_memory
from fusion_dask.worker.plugin import FusionWorker, fusion_worker
from fusion_dask.worker.stage_host import StageHost
from fusion_storage.checkpoint import Part, load_checkpoint, read_tensors, write_part

__all__ = ["Resident", "build_resident", "progress_topic", "run_stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A stage that lives on a worker: its host, and its evaluation program over the same tensors."""

    identity: str
    host: StageHost
    evaluation: TorchPlane | None


def progress_topic(run: str) -> str:
    """The Dask topic on which a run tells its steps."""
    return f"{PROGRESS}{run}"


def run_stage(task: StageTask) -> StageResult:
    """Run one stage through one segment and write its part of the checkpoint.

    Raises:
        FusionError: The stage could not go on; its neighbours are told.
    """
    worker = get_worker()
    plugin = fusion_worker(worker)
    plugin.outbox.drop(task.spec.run, task.epoch)
    try:
        resident = _take_resident(task, plugin)
        result = _segment(task, resident, worker, plugin)
    except BaseException as error:
        failure = _explained(error, task)
        if isinstance(failure, NeighbourFailed):
            cause = failure
        else:
            cause = NeighbourFailed(task.stage, str(failure) or type(failure).__name__)
        plugin.outbox.fail(task.spec.run, task.epoch, cause)
        if failure is error:
            raise
        raise failure from error
    plugin.resident = resident
    return result


def _explained(error: BaseException, task: StageTask) -> BaseException:
    """What a person can act on, of an error that is not worded for one."""
    if not is_out_of_memory(error):
        return error
    return StageError(
        task.stage,
        f"the memory of its worker is full; take more than {task.stages} stages, smaller microbatches, or "
        "lend devices with more memory",
    )


def build_resident(task: StageTask, device: torch.device) -> Resident:
    """The stage at version `task.start`, from its checkpoint or from its seed."""
    program = loads_program(task.program)
    spec = task.spec
    buffers = initialise(program.buffers, spec.seed)
    state: dict[str, torch.Tensor] = {}
    if task.start == 0:
        parameters = initialise(program.parameters, spec.seed)
    else:
        checkpoint = load_checkpoint(spec.store, spec.run, task.start)
        held = {p.name for p in program.parameters}
        wanted = held | {name for name, _ in program.buffer_updates}
        names = [n for n in checkpoint.tensor_names if n.rpartition("/")[0] in held or n in wanted]
        state = read_tensors(checkpoint, spec.store, names)
        parameters = state
        buffers |= {b.name: state[b.name] for b in program.buffers if b.name in state}
    autocast = None if spec.autocast is None else getattr(torch, spec.autocast)
    plane = TorchPlane(program, parameters, buffers, device=device, autocast=autocast)
    evaluation = None if task.evaluation is None else plane.sibling(loads_program(task.evaluation))
    host = StageHost(
        program,
        plane,
        optimizer=spec.optimizer,
        seed=spec.seed,
        microbatches=spec.microbatches,
    )
    host.restore(task.start, state)
    return Resident(identity=_identity(task), host=host, evaluation=evaluation)


def _identity(task: StageTask) -> str:
    digest = hashlib.sha256(task.program + (task.evaluation or b"")).hexdigest()
    return f"{task.spec.run}/{digest}"


def _take_resident(task: StageTask, plugin: FusionWorker) -> Resident:
    """The resident stage if it is the one and at the right version; it is gone until put back."""
    found, plugin.resident = plugin.resident, None
    if (
        isinstance(found, Resident)
        and found.identity == _identity(task)
        and found.host.version == task.start
    ):
        return found
    return build_resident(task, plugin.device)


def _segment(
    task: StageTask, resident: Resident, worker: Worker, plugin: FusionWorker
) -> StageResult:
    spec = task.spec
    begin = time.perf_counter()
    runner = StageRunner(
        resident.host,
        DaskExchange(worker, plugin),
        spec.data,
        one_f_one_b(task.stage, task.stages, spec.microbatches),
        RunnerConfig(
            run=spec.run,
            epoch=task.epoch,
            order=spec.order,
            owned=spec.owned,
            clip_norm=spec.optimizer.clip_norm,
            timeout_s=spec.timeout_s,
        ),
        plugin.pace,
    )
    steps = _Steps(task, worker, plugin)
    runner.train(task.start, task.stop, steps)
    trained_s = time.perf_counter() - begin
    computed_s, waited_s = runner.computed_s, runner.waited_s
    passes = (task.stop - task.start) * spec.microbatches
    flops = resident.host.program.flops * passes
    plugin.on_stage(spec.autocast or "float32", flops, computed_s)
    loss = None
    if resident.evaluation is not None and spec.validation is not None:
        loss = runner.evaluate(
            resident.evaluation, spec.validation, task.stop, spec.validation_microbatches
        )
    part, saved_s = _save(task, resident.host)
    return StageResult(
        part=part,
        report=StageReport(
            stage=task.stage,
            worker=str(worker.name),
            wall_s=trained_s,
            computed_s=computed_s,
            waited_s=waited_s,
            saved_s=saved_s,
            sent_bytes=runner.sent_bytes,
        ),
        steps=tuple(steps.measures),
        validation_loss=loss,
    )


def _save(task: StageTask, host: StageHost) -> tuple[Part, float]:
    begin = time.perf_counter()
    part = write_part(
        task.spec.store,
        run=task.spec.run,
        step=task.stop,
        part=f"stage-{task.stage}",
        attempt=f"{task.epoch:x}-{uuid.uuid4().hex[:8]}",
        tensors=host.state(),
    )
    return part, time.perf_counter() - begin


class _Steps:
    """Collects and tells each step of the stage that knows the loss; ends a stopped attempt."""

    def __init__(self, task: StageTask, worker: Worker, plugin: FusionWorker) -> None:
        self._task = task
        self._worker = worker
        self._plugin = plugin
        self._last = time.perf_counter()
        self.measures: list[StepMeasure] = []

    def __call__(self, result: StepResult) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._plugin.outbox.check(self._task.spec.run, self._task.epoch)
        if result.loss is None:
            return
        measure = StepMeasure(
            step=result.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            seconds=seconds,
        )
        self.measures.append(measure)
        event = {"epoch": self._task.epoch, "measure": dataclasses.asdict(measure)}
        self._worker.log_event(progress_topic(self._task.spec.run), event)
