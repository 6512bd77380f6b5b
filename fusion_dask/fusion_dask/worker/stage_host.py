"""The stage host: one stage of one run, resident on one worker.

It holds the stage's parameters, optimizer state and version, and offers what a schedule is made of:
`forward`, `backward`, `update`. It contains no Dask, no clock and no network.

Invariant: `version` counts the updates that have been applied. Work for another step than `version`
is refused, so a stale or repeated instruction can never be mixed into the state.
"""

from collections.abc import Mapping, Sequence

import torch

from fusion_dask.errors import StageError
from fusion_dask.graph.ir import StageProgram
from fusion_dask.planes.base import Forward, Plane, RandomKey
from fusion_dask.worker.optimizer import (
    OptimizerConfig,
    build_optimizer,
    learning_rate,
    load_state,
    named_state,
)

__all__ = ["StageHost"]


class StageHost:
    """A stage in training.

    Args:
        program: The stage's program.
        plane: Computes it; holds the parameters.
        optimizer: The recipe.
        seed: The run's seed, keys every random number.
        microbatches: Microbatches in a global batch.
    """

    def __init__(
        self,
        program: StageProgram,
        plane: Plane,
        *,
        optimizer: OptimizerConfig,
        seed: int,
        microbatches: int,
    ) -> None:
        self.program = program
        self.plane = plane
        self.version = 0
        self._config = optimizer
        self._seed = seed
        self._microbatches = microbatches
        self._trainable = {n: p for n, p in plane.parameters().items() if p.requires_grad}
        self._optimizer = build_optimizer(self._trainable, optimizer)
        self._shared = dict(program.shared)

    @property
    def index(self) -> int:
        """Position of the stage in its pipeline."""
        return self.program.index

    def forward(
        self,
        step: int,
        microbatch: int,
        inputs: Mapping[str, torch.Tensor],
        received: Mapping[str, torch.Tensor],
    ) -> Forward:
        """Forward of one microbatch of the step that is being computed."""
        self._check(step)
        key = RandomKey(seed=self._seed, step=step, microbatch=microbatch)
        return self.plane.forward(inputs, received, key, keep=True)

    def backward(
        self, step: int, microbatch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Backward of one microbatch; gradients accumulate in the order of the calls."""
        self._check(step)
        return self.plane.backward(microbatch, gradients, 1.0 / self._microbatches)

    def shared(self) -> list[str]:
        """Trainable tied parameters that other stages hold too, in the model's order."""
        return [name for name in self._trainable if len(self._shared.get(name, ())) > 1]

    def shared_gradients(self) -> dict[str, torch.Tensor]:
        """This stage's part of the gradient of each of `shared()`."""
        return {name: _gradient(self._trainable[name]) for name in self.shared()}

    def sharers(self, name: str) -> tuple[int, ...]:
        """The stages that hold a tied parameter, ascending."""
        return self._shared[name]

    def set_gradient(self, name: str, parts: Sequence[torch.Tensor]) -> None:
        """Give a tied parameter the sum of its parts, taken in the order of the stages."""
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        self._trainable[name].grad = total

    def owned(self) -> list[str]:
        """Trainable parameters whose owner is this stage, in the model's order."""
        return [n for n in self._trainable if self._shared.get(n, (self.index,))[0] == self.index]

    def gradient_norms(self) -> dict[str, float]:
        """2-norm of the gradient of every owned parameter, in fp32."""
        return {
            n: float(torch.linalg.vector_norm(_gradient(self._trainable[n]), dtype=torch.float32))
            for n in self.owned()
        }

    def update(self, step: int, gradient_scale: float) -> None:
        """One optimizer update; ends the step.

        Args:
            step: The step that ends.
            gradient_scale: Factor of every gradient, from clipping by global norm; at most 1.
        """
        self._check(step)
        rate = learning_rate(self._config, step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for parameter in self._trainable.values():
            # Every parameter takes part in every update, so that one count fits all of them.
            parameter.grad = _gradient(parameter)
        gradients = [p.grad for p in self._trainable.values() if p.grad is not None]
        if gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint of this stage stores.

        Parameters that it owns, their optimizer slots, and the buffers that training changes; a
        tied parameter is stored by its owner alone.
        """
        parameters = {
            n: p.detach()
            for n, p in self.plane.parameters().items()
            if self._shared.get(n, (self.index,))[0] == self.index
        }
        slots = named_state(self._optimizer, {n: self._trainable[n] for n in self.owned()})
        buffers = {n: self.plane.buffers()[n] for n, _ in self.program.buffer_updates}
        return {**parameters, **slots, **buffers}

    def restore(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a checkpoint's optimizer state; parameters went into the plane before."""
        load_state(self._optimizer, self._trainable, tensors, version)
        self.version = version

    def _check(self, step: int) -> None:
        if step != self.version:
            raise StageError(self.index, f"asked for step {step} but holds version {self.version}")


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
