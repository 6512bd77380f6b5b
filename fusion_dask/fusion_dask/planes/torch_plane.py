"""The PyTorch plane: a stage program interpreted operator by operator under autograd.

Covers any device that torch names. Operators are looked up through the graph's allow-list only. What
is FREE runs first, outside autocast and autograd: positions and masks keep the precision in which
they were captured, and what depends on nothing but constants is computed once.

Invariant: with equal program, tensors, key, device class and thread count the results are equal bit
for bit. Every random operator seeds the device's generator from its key, so neither the order of
microbatches nor the partition nor a replay changes what it draws.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_dask.graph.ir import Argument, Constant, Kind, Operator, Ref, StageProgram, Tag
from fusion_dask.graph.operators import resolve, tag_value
from fusion_dask.planes.base import Forward, RandomKey

__all__ = ["TorchPlane"]

_Environment = dict[str, Any]

# A random operator seeds the device's one generator and draws: two stages in one process (tests,
# several stages per worker) must not interleave these two.
_GENERATOR_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Instruction:
    call: Callable[..., Any]
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[str | None, ...]
    random: str | None  # the name that keys it
    release: tuple[str, ...]  # values that nothing reads after this


@dataclass(slots=True)
class _Kept:
    received: dict[str, torch.Tensor]
    sends: dict[str, torch.Tensor]
    loss: torch.Tensor | None


class TorchPlane:
    """A stage on a torch device.

    Args:
        program: What to compute.
        parameters: Every parameter of the program, on any device; trainable ones are made to
            require a gradient. Tensors already on `device` are used as they are, not copied.
        buffers: Every buffer of the program.
        device: A torch device.
        autocast: Dtype of automatic mixed precision, or None for the captured dtypes.
    """

    def __init__(
        self,
        program: StageProgram,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.program = program
        self.device = device
        self._autocast = autocast
        trainable = {p.name: p.trainable for p in program.parameters}
        self._parameters = {
            p.name: parameters[p.name].detach().to(device).requires_grad_(trainable[p.name])
            for p in program.parameters
        }
        self._buffers = {b.name: buffers[b.name].detach().to(device) for b in program.buffers}
        self._kept: dict[int, _Kept] = {}
        self._fixed = self._fold_constants()
        wanted = {v.name for port in program.sends for v in port.values}
        wanted |= {o.value for o in program.outputs}
        wanted |= {value for _, value in program.buffer_updates}
        rest = [o for o in program.operators if not all(n in self._fixed for n in _output_names(o))]
        self._free = _compile([o for o in rest if o.kind is Kind.FREE], None, device)
        self._main = _compile([o for o in rest if o.kind is not Kind.FREE], wanted, device)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters held, by name."""
        return self._parameters

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers held, by name, as the last forward left them."""
        return self._buffers

    def sibling(self, program: StageProgram) -> "TorchPlane":
        """Another program over the same parameters and buffers, as they are at any moment."""
        other = TorchPlane(
            program, self._parameters, self._buffers, device=self.device, autocast=self._autocast
        )
        other._buffers = self._buffers
        return other

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: Mapping[str, torch.Tensor],
        key: RandomKey,
        *,
        keep: bool,
    ) -> Forward:
        """Compute one microbatch.

        Args:
            inputs: User inputs of the program by name, on the plane's device.
            received: Boundary tensors by value name, on the plane's device.
            key: Keys the random operators; its microbatch names what `backward` refers to.
            keep: Remember what the backward needs; without, nothing is recorded.

        Returns:
            Detached boundary tensors and outputs.
        """
        leaves = {
            v.name: received[v.name].detach().requires_grad_(v.grad and keep)
            for port in self.program.receives
            for v in port.values
        }
        env: _Environment = {**self._fixed, **self._buffers, **inputs}
        with torch.no_grad():
            self._execute(self._free, env, key)
        env.update(self._parameters)
        env.update(leaves)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(keep))
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self._autocast))
            self._execute(self._main, env, key)
        self._buffers.update({name: env[v].detach() for name, v in self.program.buffer_updates})
        sends = {v.name: env[v.name] for port in self.program.sends for v in port.values}
        outputs = {o.role: env[o.value] for o in self.program.outputs}
        if keep:
            self._kept[key.microbatch] = _Kept(leaves, sends, outputs.get("loss"))
        return Forward(
            sends={name: t.detach() for name, t in sends.items()},
            outputs={role: t.detach() for role, t in outputs.items()},
        )

    def backward(
        self, microbatch: int, gradients: Mapping[str, torch.Tensor], loss_gradient: float
    ) -> Mapping[str, torch.Tensor]:
        """Run the backward of a kept microbatch.

        Args:
            microbatch: As in the key of its forward.
            gradients: Gradients of the boundary tensors that were sent, summed over the stages that
                they went to.
            loss_gradient: Gradient of the loss: 1 / microbatches for a mean over the global batch.

        Returns:
            Gradients of the received boundary tensors that carry one; zeros where none arrived.
        """
        kept = self._kept.pop(microbatch)
        roots = [t for name, t in kept.sends.items() if name in gradients and t.requires_grad]
        seeds = [
            gradients[name].to(t.dtype)
            for name, t in kept.sends.items()
            if name in gradients and t.requires_grad
        ]
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            seeds.append(torch.full_like(kept.loss, loss_gradient))
        if roots:
            torch.autograd.backward(roots, seeds)
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in kept.received.items()
            if leaf.requires_grad
        }

    def _fold_constants(self) -> _Environment:
        """Compute once what is free and depends only on constants and buffers that never change."""
        env: _Environment = {c.name: _constant(c, self.device) for c in self.program.constants}
        mutated = {name for name, _ in self.program.buffer_updates}
        known = {**env, **{n: b for n, b in self._buffers.items() if n not in mutated}}
        for operator in self.program.operators:
            foldable = operator.kind is Kind.FREE and not operator.random
            if foldable and all(name in known for name in operator.inputs):
                with torch.no_grad():
                    self._execute(_compile([operator], None, self.device), known, None)
        held = set(self._buffers)
        return {name: value for name, value in known.items() if name not in held}

    def _execute(
        self, instructions: Sequence[_Instruction], env: _Environment, key: RandomKey | None
    ) -> None:
        for step in instructions:
            args = [_bind(a, env) for a in step.args]
            kwargs = {name: _bind(a, env) for name, a in step.kwargs}
            if step.random is None or key is None:
                result = step.call(*args, **kwargs)
            else:
                with _GENERATOR_LOCK:
                    _seed_device(self.device, key.derive(step.random))
                    result = step.call(*args, **kwargs)
            if len(step.outputs) == 1 and not isinstance(result, tuple | list):
                env[step.outputs[0] or ""] = result
            else:
                for name, value in zip(step.outputs, result, strict=False):
                    if name is not None:
                        env[name] = value
            for name in step.release:
                env.pop(name, None)


def _output_names(operator: Operator) -> list[str]:
    return [v.name for v in operator.outputs if v is not None]


def _compile(
    operators: Sequence[Operator], wanted: Iterable[str] | None, device: torch.device
) -> list[_Instruction]:
    """Resolve targets; with `wanted`, release every other value after its last reader."""
    last_reader = {name: i for i, o in enumerate(operators) for name in o.inputs}
    produced: dict[str, int] = {n: i for i, o in enumerate(operators) for n in _output_names(o)}
    release: dict[int, list[str]] = {}
    if wanted is not None:
        keep = set(wanted)
        for name, producer in produced.items():
            if name not in keep:
                release.setdefault(last_reader.get(name, producer), []).append(name)
    return [
        _Instruction(
            resolve(o.target),
            tuple(_freeze(a, device) for a in o.args),
            tuple((name, _freeze(a, device)) for name, a in o.kwargs),
            tuple(None if v is None else v.name for v in o.outputs),
            o.name if o.random else None,
            tuple(release.get(i, ())),
        )
        for i, o in enumerate(operators)
    ]


def _freeze(argument: Argument, device: torch.device) -> Any:  # noqa: ANN401 - torch values
    """Replace tags by what they mean on this device; references stay."""
    if isinstance(argument, Tag):
        return tag_value(argument, device)
    if isinstance(argument, tuple):
        items = [_freeze(a, device) for a in argument]
        # A tuple marks "look inside for references"; a list is passed as it is.
        return tuple(items) if any(isinstance(a, Ref | tuple) for a in items) else items
    return argument


def _bind(argument: Any, env: _Environment) -> Any:  # noqa: ANN401 - torch values
    if isinstance(argument, Ref):
        return env[argument.name]
    if isinstance(argument, tuple):
        return [_bind(a, env) for a in argument]
    return argument


def _constant(constant: Constant, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, constant.spec.dtype)
    if not constant.data:
        return torch.empty(constant.spec.shape, dtype=dtype, device=device)
    flat = torch.frombuffer(bytearray(constant.data), dtype=dtype)
    return flat.reshape(constant.spec.shape).to(device)


def _seed_device(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
