"""Check the declared shapes and dtypes of a program without computing anything.

Runs the operators on fake tensors, which have a shape and no memory. So a program that claims a
small result and would make a huge one is caught before a worker allocates it.

Does not cover workspaces inside an operator.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from fusion_dask.errors import ProgramError
from fusion_dask.graph.ir import (
    Argument,
    Buffer,
    Constant,
    Graph,
    Operator,
    Parameter,
    Ref,
    StageProgram,
    Tag,
    TensorSpec,
    Value,
)
from fusion_dask.graph.operators import bound_arguments, resolve, tag_value

__all__ = ["Leaf", "call_arguments", "check_shapes", "empty_tensor", "leaves"]

_SPLITS = frozenset({"split", "unsafe_split", "chunk", "unsafe_chunk", "unbind"})
_FEW_PIECES = 4096  # so many are cheap to make; what does not match is found afterwards

Leaf = Value | Parameter | Buffer | Constant


def leaves(program: Graph | StageProgram, received: Iterable[Value] = ()) -> Iterator[Leaf]:
    """What a program reads without making it."""
    yield from program.inputs
    yield from program.parameters
    yield from program.buffers
    yield from program.constants
    yield from received


def check_shapes(program: Graph | StageProgram, received: Iterable[Value] = ()) -> None:
    """Raise ProgramError unless every operator makes tensors of the declared shapes."""
    with FakeTensorMode(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values: dict[str, Any] = {
            part.name: empty_tensor(part.spec, "cpu") for part in leaves(program, received)
        }
        for operator in program.operators:
            _run(operator, values)


def empty_tensor(spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
    """A tensor of that shape; under a fake tensor mode it takes no memory."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def call_arguments(
    operator: Operator, values: dict[str, Any], device: torch.device | str
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keyword arguments for the torch operator."""

    def real(argument: Argument) -> Any:  # noqa: ANN401 - a tensor, a number or a torch type
        if isinstance(argument, Ref):
            return values[argument.name]
        if isinstance(argument, Tag):
            return tag_value(argument, device)
        if isinstance(argument, tuple):
            return [real(item) for item in argument]
        return argument

    return [real(a) for a in operator.args], {key: real(a) for key, a in operator.kwargs}


def _check_count(operator: Operator, values: dict[str, Any]) -> None:
    """Refuse a split into far more pieces than are declared before making them."""
    name = operator.target.split(".")[1]
    if name not in _SPLITS:
        return
    bound = bound_arguments(operator)
    source, dim = bound.get("self"), bound.get("dim", 0)
    if not isinstance(source, Ref) or type(dim) is not int:
        raise ProgramError(f"operator {operator.name!r} does not fit its arguments: it is damaged")
    shape = values[source.name].shape
    size = shape[dim] if -len(shape) <= dim < len(shape) else 0
    part = bound.get("split_size", bound.get("chunks", 1))
    pieces = size
    if type(part) is int and part > 0:
        pieces = min(part, size) if "chunks" in bound else -(-size // part)
    if pieces > max(len(operator.outputs), _FEW_PIECES):
        raise ProgramError(f"operator {operator.name!r} makes {pieces} values: it is damaged")


def _run(operator: Operator, values: dict[str, Any]) -> None:
    _check_count(operator, values)
    args, kwargs = call_arguments(operator, values, "cpu")
    try:
        made = resolve(operator.target)(*args, **kwargs)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"operator {operator.name!r} does not fit its arguments ({type(error).__name__}): the "
            "program is damaged or was tampered with"
        ) from error
    results = made if isinstance(made, list | tuple) else (made,)
    if len(results) != len(operator.outputs):
        raise ProgramError(f"operator {operator.name!r} makes {len(results)} values: it is damaged")
    for value, result in zip(operator.outputs, results, strict=True):
        if value is None:
            continue
        dtype = str(result.dtype).removeprefix("torch.")
        if tuple(result.shape) != value.spec.shape or dtype != value.spec.dtype:
            raise ProgramError(
                f"value {value.name!r} is declared {value.spec.dtype}{list(value.spec.shape)} and "
                f"would be {dtype}{[str(s) for s in result.shape]}: the program was tampered with"
            )
        values[value.name] = result
