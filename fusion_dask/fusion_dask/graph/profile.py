"""What one operator costs, found by running it on tensors without memory.

Two runs a distinct call: on meta tensors under torch's own FLOP counter, forward and backward, and
on fake CPU tensors under hooks that see what autograd keeps. Equal calls (the blocks of a
transformer) are run once.

Does not cover: time, workspaces inside a kernel, what another device's attention kernel keeps.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fusion_dask.graph.infer import call_arguments
from fusion_dask.graph.ir import Operator, Ref, TensorSpec
from fusion_dask.graph.operators import resolve

__all__ = ["Layout", "OperatorProfile", "Profiler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor lies in memory, and whether autograd follows it."""

    spec: TensorSpec
    stride: tuple[int, ...]
    grad: bool

    @classmethod
    def contiguous(cls, spec: TensorSpec, *, grad: bool) -> "Layout":
        """The layout of a fresh tensor."""
        strides: list[int] = []
        step = 1
        for size in reversed(spec.shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(spec=spec, stride=tuple(reversed(strides)), grad=grad)

    def make(self, device: str) -> Tensor:
        """A tensor of this layout."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        made = torch.empty_strided(self.spec.shape, self.stride, dtype=dtype, device=device)
        return made.requires_grad_(self.grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """The cost of one call.

    Attributes:
        flops_forward: A multiply-add counts two.
        flops_backward: Of the gradients that are asked for.
        outputs: Layout of each output.
        views: For each output the input whose memory it shares, or None.
        output_bytes: For each output the bytes of its own memory.
        saved_inputs: Inputs that autograd keeps.
        saved_outputs: Outputs that it keeps.
        saved_inside: Bytes of what it keeps besides.
    """

    flops_forward: int
    flops_backward: int
    outputs: tuple[Layout, ...]
    views: tuple[int | None, ...]
    output_bytes: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    saved_inside: int


class Profiler:
    """Profiles operators, each distinct call once."""

    def __init__(self) -> None:
        self._known: dict[object, OperatorProfile] = {}
        self._fake = FakeTensorMode()

    def profile(
        self, operator: Operator, layouts: Mapping[str, Layout], *, track: bool
    ) -> OperatorProfile:
        """The cost of an operator for inputs of these layouts.

        Args:
            operator: The call.
            layouts: By value name; at least those that it reads.
            track: Autograd is on, as it is outside of FREE operators.
        """
        names = operator.inputs
        inputs = [layouts[name] for name in names]
        position = {name: i for i, name in enumerate(names)}
        key = (
            operator.target,
            _with_positions(operator.args, position),
            _with_positions(operator.kwargs, position),
            tuple(inputs),
            track,
        )
        found = self._known.get(key)
        if found is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self._run(operator, dict(zip(names, inputs, strict=True)), track)
            self._known[key] = found
        return found

    def _run(
        self, operator: Operator, inputs: Mapping[str, Layout], track: bool
    ) -> OperatorProfile:
        forward, backward = _count_flops(operator, inputs, track)
        with self._fake, torch.set_grad_enabled(track):
            tensors = {name: layout.make("cpu") for name, layout in inputs.items()}
            saved: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(_keeping(saved), lambda kept: kept):
                made = _call(operator, tensors, "cpu")
            return _describe(made, list(tensors.values()), saved, forward, backward)


def _with_positions(argument: Any, position: Mapping[str, int]) -> Any:  # noqa: ANN401
    """The argument with inputs numbered, so that calls differing in names only are equal."""
    if isinstance(argument, tuple):
        return tuple(_with_positions(item, position) for item in argument)
    if isinstance(argument, Ref):
        return ("input", position[argument.name])
    return (type(argument).__name__, argument)


def _keeping(saved: list[Tensor]) -> Any:  # noqa: ANN401 - the hook's type is torch's
    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return pack


def _call(operator: Operator, tensors: dict[str, Tensor], device: str) -> list[Tensor]:
    args, kwargs = call_arguments(operator, tensors, device)
    made = resolve(operator.target)(*args, **kwargs)
    return list(made) if isinstance(made, tuple | list) else [made]


def _count_flops(operator: Operator, inputs: Mapping[str, Layout], track: bool) -> tuple[int, int]:
    tensors = {name: layout.make("meta") for name, layout in inputs.items()}
    with torch.set_grad_enabled(track), FlopCounterMode(display=False) as counter:
        made = _call(operator, tensors, "meta")
    forward = counter.get_total_flops()
    roots = [m for m in made if m.requires_grad]
    wanted = [t for t in tensors.values() if t.requires_grad]
    if not roots or not wanted or not forward:
        return forward, 0
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(roots, wanted, [torch.empty_like(r) for r in roots], allow_unused=True)
    return forward, counter.get_total_flops()


def _describe(
    made: list[Tensor], inputs: list[Tensor], saved: list[Tensor], forward: int, backward: int
) -> OperatorProfile:
    of_input = {_storage(t): i for i, t in reversed(list(enumerate(inputs)))}
    of_output = {_storage(t): i for i, t in reversed(list(enumerate(made)))}
    kept = {_storage(t): t for t in saved}
    inside = [t for key, t in kept.items() if key not in of_input and key not in of_output]
    return OperatorProfile(
        flops_forward=forward,
        flops_backward=backward,
        outputs=tuple(
            Layout(
                spec=TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")),
                stride=tuple(t.stride()),
                grad=t.requires_grad,
            )
            for t in made
        ),
        views=tuple(of_input.get(_storage(t)) for t in made),
        output_bytes=tuple(t.untyped_storage().nbytes() for t in made),
        saved_inputs=tuple(sorted(of_input[k] for k in kept if k in of_input)),
        saved_outputs=tuple(
            sorted(of_output[k] for k in kept if k in of_output and k not in of_input)
        ),
        saved_inside=sum(t.untyped_storage().nbytes() for t in inside),
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
