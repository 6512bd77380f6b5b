"""Runs the schedule of one stage over the steps of a segment.

One runner drives one stage host through forward, backward and update, step after step, and meets the
other stages only through boundary tensors. It contains no Dask: the same code runs in a thread, in a
Dask task, or replayed on a spare.

At the end of a step, in this order:

1. the stages that hold a tied parameter exchange their parts of its gradient, and each sums them in
   the order of the stages, so that every copy takes the same update;
2. if gradients are clipped, each stage sends the norms of the parameters that it owns to stage 0,
   which folds them in the order of the model's parameters and answers with the global norm and the
   factor, as `torch.nn.utils.clip_grad_norm_` computes them;
3. every stage updates.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fusion_dask.errors import StageError
from fusion_dask.graph.ir import Port, StageProgram, Value
from fusion_dask.pipeline.exchange import Exchange, Receiver
from fusion_dask.planes.base import Plane, RandomKey
from fusion_dask.planner.schedule import Action, Direction
from fusion_dask.worker.outbox import BoundaryKey, Channel
from fusion_dask.worker.pace import Pace
from fusion_dask.worker.stage_host import StageHost

__all__ = ["DataSource", "RunnerConfig", "StageRunner", "StepResult", "clip_factor"]

_ALL_OF_STEP = 1 << 30  # a microbatch number above any real one


class DataSource(Protocol):
    """Where a stage reads its user inputs."""

    def microbatch(
        self, step: int, microbatch: int, names: Sequence[str]
    ) -> Mapping[str, torch.Tensor]:
        """The named inputs of one microbatch of a global batch; the same for equal arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """What a runner needs besides host, exchange and data.

    Attributes:
        run: Name of the run.
        epoch: Attempt of the run.
        order: The model's trainable parameters in its own order; sums of norms follow it.
        owned: Per stage, the trainable parameters whose norms it sends.
        clip_norm: Largest global gradient norm, or None.
        prefetch: Pulls under way at once.
        timeout_s: Longest wait for one boundary tensor.
    """

    run: str
    epoch: int
    order: tuple[str, ...]
    owned: tuple[tuple[str, ...], ...]
    clip_norm: float | None
    prefetch: int = 3
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a stage knows at the end of a step; `loss` only where the loss is computed."""

    step: int
    loss: float | None
    gradient_norm: float | None


def clip_factor(norms: Sequence[float], clip_norm: float) -> tuple[float, float]:
    """Global norm and the factor that brings it to at most `clip_norm`, in fp32.

    The same arithmetic as `torch.nn.utils.clip_grad_norm_`.

    >>> clip_factor([3.0, 4.0], 10.0)
    (5.0, 1.0)
    """
    total = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float32))
    return float(total), float(torch.clamp(clip_norm / (total + 1e-6), max=1.0))


class StageRunner:
    """Drives one stage through a segment.

    Attributes:
        waited_s: Seconds spent waiting for boundary tensors so far.
        computed_s: Seconds spent in forward, backward and update so far.
        sent_bytes: Bytes of boundary tensors published so far.
    """

    def __init__(
        self,
        host: StageHost,
        exchange: Exchange,
        data: DataSource,
        schedule: Sequence[Action],
        config: RunnerConfig,
        pace: Pace,
    ) -> None:
        self._host = host
        self._exchange = exchange
        self._data = data
        self._schedule = schedule
        self._config = config
        self._pace = pace
        self._program = host.program
        self._device = host.plane.device
        self.waited_s = 0.0
        self.computed_s = 0.0
        self.sent_bytes = 0

    def train(self, start: int, stop: int, on_step: Callable[[StepResult], None]) -> None:
        """Run steps `start` to `stop` - 1.

        Args:
            start: The first step; the host's version.
            stop: One past the last step.
            on_step: Called after each update.

        Raises:
            StageError: The loss is not finite, or the host is at another version.
            ExchangeTimeout: A neighbour did not answer.
        """
        keys = (key for step in range(start, stop) for key in self._keys_of_step(step))
        receiver = self._receiver(keys, start)
        for step in range(start, stop):
            losses: list[float] = []
            for action in self._schedule:
                losses += self._act(step, action, receiver)
            self._sum_shared(step, receiver)
            norm, factor = self._global_norm(step, receiver)
            with self._computing():
                self._host.update(step, factor)
            on_step(StepResult(step=step, loss=_mean(losses), gradient_norm=norm))
        self.waited_s += receiver.waited_s

    def evaluate(self, plane: Plane, data: DataSource, step: int, count: int) -> float | None:
        """Mean loss of `count` microbatches without gradients; None where no loss is computed.

        Args:
            plane: This stage's evaluation program, over the parameters in training.
            data: Held-out data; its microbatches are those of step 0.
            step: Versions the boundary tensors.
            count: Microbatches.
        """
        program = plane.program
        receives = [
            (self._channel("evaluation", p.stage, program.index), p) for p in program.receives
        ]
        keys = (BoundaryKey(c, step, m) for m in range(count) for c, _ in receives)
        receiver = self._receiver(keys, step)
        losses: list[float] = []
        for m in range(count):
            received: dict[str, torch.Tensor] = {}
            for channel, port in receives:
                received |= self._named(port, receiver.take(BoundaryKey(channel, step, m)))
            inputs = self._inputs(data, program, 0, m)
            key = RandomKey(seed=0, step=step, microbatch=m)
            with self._computing():
                result = plane.forward(inputs, received, key, keep=False)
            for port in program.sends:
                channel = self._channel("evaluation", program.index, port.stage)
                tensors = [result.sends[v.name] for v in port.values]
                self._publish(BoundaryKey(channel, step, m), tensors)
            if "loss" in result.outputs:
                losses.append(float(result.outputs["loss"]))
        self.waited_s += receiver.waited_s
        return _mean(losses)

    def _act(self, step: int, action: Action, receiver: Receiver) -> list[float]:
        if action.direction is Direction.BACKWARD:
            self._backward(step, action.microbatch, receiver)
            return []
        return self._forward(step, action.microbatch, receiver)

    def _forward(self, step: int, microbatch: int, receiver: Receiver) -> list[float]:
        received: dict[str, torch.Tensor] = {}
        for port in self._program.receives:
            key = self._incoming("activation", port, step, microbatch)
            received |= self._named(port, receiver.take(key))
        inputs = self._inputs(self._data, self._program, step, microbatch)
        with self._computing():
            result = self._host.forward(step, microbatch, inputs, received)
        for port in self._program.sends:
            key = self._outgoing("activation", port, step, microbatch)
            self._publish(key, [result.sends[v.name] for v in port.values])
        if "loss" not in result.outputs:
            return []
        loss = float(result.outputs["loss"])
        if not math.isfinite(loss):
            raise StageError(
                self._program.index,
                f"the loss of step {step} is {loss}; lower the learning rate or clip gradients, "
                "and resume from the last checkpoint",
            )
        return [loss]

    def _backward(self, step: int, microbatch: int, receiver: Receiver) -> None:
        gradients: dict[str, torch.Tensor] = {}
        for port in self._program.sends:
            carried = _with_gradient(port)
            if not carried:
                continue
            key = self._incoming("gradient", port, step, microbatch)
            for value, tensor in zip(carried, receiver.take(key), strict=True):
                part = tensor.to(self._device)
                known = gradients.get(value.name)
                gradients[value.name] = part if known is None else known + part
        with self._computing():
            upstream = self._host.backward(step, microbatch, gradients)
        for port in self._program.receives:
            carried = _with_gradient(port)
            if carried:
                key = self._outgoing("gradient", port, step, microbatch)
                self._publish(key, [upstream[v.name] for v in carried])

    def _sum_shared(self, step: int, receiver: Receiver) -> None:
        me = self._program.index
        own = self._host.shared_gradients()
        for name, gradient in own.items():
            for other in self._others(name):
                key = self._shared_key(name, me, other, step)
                self._publish(key, [gradient])
        for name, gradient in own.items():
            parts = {me: gradient}
            for other in self._others(name):
                key = self._shared_key(name, other, me, step)
                parts[other] = receiver.take(key)[0].to(self._device)
            self._host.set_gradient(name, [parts[s] for s in sorted(parts)])

    def _global_norm(self, step: int, receiver: Receiver) -> tuple[float | None, float]:
        """Global gradient norm and the factor to clip by; stage 0 computes both."""
        clip = self._config.clip_norm
        if clip is None:
            return None, 1.0
        me, owned = self._program.index, self._config.owned
        with self._computing():
            norms = self._host.gradient_norms()
        if me != 0:
            values = torch.tensor([norms[n] for n in owned[me]], dtype=torch.float32)
            self._publish(BoundaryKey(self._channel("norm", me, 0), step, 0), [values])
            key = BoundaryKey(self._channel("scale", 0, me), step, 0)
            total, factor = receiver.take(key)[0].tolist()
            return total, factor
        for other in range(1, self._program.count):
            key = BoundaryKey(self._channel("norm", other, 0), step, 0)
            norms.update(zip(owned[other], receiver.take(key)[0].tolist(), strict=True))
        total, factor = clip_factor([norms[n] for n in self._config.order], clip)
        for other in range(1, self._program.count):
            key = BoundaryKey(self._channel("scale", 0, other), step, 0)
            self._publish(key, [torch.tensor([total, factor], dtype=torch.float64)])
        return total, factor

    def _keys_of_step(self, step: int) -> Iterator[BoundaryKey]:
        """Everything that this stage takes in one step, in the order in which it takes it."""
        for direction, m in self._schedule:
            forward = direction is Direction.FORWARD
            for port in self._program.receives if forward else self._program.sends:
                if forward or _with_gradient(port):
                    yield self._incoming("activation" if forward else "gradient", port, step, m)
        me, count = self._program.index, self._program.count
        for name in self._host.shared():
            for other in self._others(name):
                yield self._shared_key(name, other, me, step)
        if self._config.clip_norm is not None:
            if me == 0:
                for other in range(1, count):
                    yield BoundaryKey(self._channel("norm", other, 0), step, 0)
            else:
                yield BoundaryKey(self._channel("scale", 0, me), step, 0)

    def _receiver(self, keys: Iterator[BoundaryKey], step: int) -> Receiver:
        return Receiver(
            self._exchange,
            keys,
            window=self._config.prefetch,
            timeout_s=self._config.timeout_s,
            start=(step - 1, _ALL_OF_STEP),
        )

    def _others(self, name: str) -> list[int]:
        return [s for s in self._host.sharers(name) if s != self._program.index]

    def _channel(self, kind: str, source: int, target: int) -> Channel:
        return Channel(self._config.run, self._config.epoch, kind, source, target)

    def _incoming(self, kind: str, port: Port, step: int, microbatch: int) -> BoundaryKey:
        return BoundaryKey(self._channel(kind, port.stage, self._program.index), step, microbatch)

    def _outgoing(self, kind: str, port: Port, step: int, microbatch: int) -> BoundaryKey:
        return BoundaryKey(self._channel(kind, self._program.index, port.stage), step, microbatch)

    def _shared_key(self, name: str, source: int, target: int, step: int) -> BoundaryKey:
        number = self._config.order.index(name)
        return BoundaryKey(self._channel("tied", source, target), step, number)

    def _publish(self, key: BoundaryKey, tensors: Sequence[torch.Tensor]) -> None:
        host = [t.detach().to("cpu") for t in tensors]
        self.sent_bytes += sum(t.nbytes for t in host)
        self._exchange.publish(key, host)

    def _named(self, port: Port, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        pairs = zip(port.values, tensors, strict=True)
        return {value.name: tensor.to(self._device) for value, tensor in pairs}

    def _inputs(
        self, data: DataSource, program: StageProgram, step: int, microbatch: int
    ) -> dict[str, torch.Tensor]:
        if not program.inputs:
            return {}
        names = [v.name for v in program.inputs]
        batch = data.microbatch(step, microbatch, names)
        return {name: batch[name].to(self._device) for name in names}

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self._pace.work():
            yield
        self.computed_s += time.perf_counter() - begin


def _with_gradient(port: Port) -> list[Value]:
    return [v for v in port.values if v.grad]


def _mean(losses: Sequence[float]) -> float | None:
    """Mean in the order of the microbatches; None of nothing."""
    return sum(losses) / len(losses) if losses else None
