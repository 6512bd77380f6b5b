"""One model at any batch size, where it allows that.

A graph has fixed shapes, so that its costs are numbers. `capture_sizes` captures a model at two batch
sizes and finds every integer that grows with the batch, in shapes and in arguments; a third capture
proves it. `at` then gives the graph of any size without the model, and cut positions mean the same
in all of them.

Does not cover sequence lengths, nor models whose graph changes with the batch: those are refused.

Invariant: `at(size)` equals a capture at that size.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn

from fusion_dask.errors import CaptureError, ProgramError
from fusion_dask.graph.capture import capture
from fusion_dask.graph.infer import check_shapes
from fusion_dask.graph.ir import Graph

__all__ = ["SizedGraph", "capture_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedGraph:
    """Two captures of a model, `size` and `size + 1` long in the batch dimension."""

    size: int
    small: Graph
    large: Graph

    def at(self, size: int) -> Graph:
        """The graph for a batch of this size; its costs are zero, as those of a capture.

        Raises:
            CaptureError: The model does not work at this size.
        """
        if size < 1:
            raise ValueError(f"a batch has at least one element, not {size}")
        graph = cast("Graph", self._scaled(self.small, self.large, size))
        try:
            check_shapes(graph)
        except ProgramError as error:
            raise CaptureError(
                f"the model does not work for a batch of {size} ({error}): use the size that was "
                f"captured, {self.size}"
            ) from error
        return graph

    def _scaled(self, small: Any, large: Any, size: int) -> Any:  # noqa: ANN401 - any field
        if type(small) is not type(large):
            raise _Differs
        if isinstance(small, tuple):
            if len(small) != len(large):
                raise _Differs
            pairs = zip(small, large, strict=True)
            return tuple(self._scaled(a, b, size) for a, b in pairs)
        if dataclasses.is_dataclass(small) and not isinstance(small, type):
            return self._scaled_record(small, large, size)
        if type(small) is int and small != large:
            return small + (large - small) * (size - self.size)
        if small != large:
            raise _Differs
        return small

    def _scaled_record(self, small: Any, large: Any, size: int) -> Any:  # noqa: ANN401
        changed = {}
        for field in dataclasses.fields(small):
            a, b = getattr(small, field.name), getattr(large, field.name)
            if isinstance(a, str | bytes | float | bool | Enum) and a != b:
                raise _Differs
            changed[field.name] = self._scaled(a, b, size)
        return dataclasses.replace(small, **changed)


class _Differs(Exception):
    """Two captures differ in more than integers."""


def capture_sizes(
    module: nn.Module,
    example_inputs: Mapping[str, Tensor],
    *,
    batched: Collection[str] | None = None,
    training: bool = True,
) -> SizedGraph:
    """Capture a model so that its graph can be had at any batch size.

    Args:
        module: As for `capture`.
        example_inputs: As for `capture`; a batch of one counts as two, since one broadcasts.
        batched: The inputs whose first dimension is the batch; all of them by default.
        training: As for `capture`.

    Raises:
        CaptureError: It cannot be captured, or its graph changes with the size of the batch.
    """
    names = set(example_inputs if batched is None else batched)
    sizes = {example_inputs[name].shape[0] for name in names}
    if len(sizes) != 1:
        raise CaptureError(
            f"the batched inputs have different sizes {sorted(sizes)} in their first dimension: "
            "name with `batched` those that share it"
        )
    size = max(sizes.pop(), 2)
    small, large, proof = (
        capture(module, _resized(example_inputs, names, size + i), training=training)
        for i in range(3)
    )
    found = SizedGraph(size=size, small=small, large=large)
    try:
        agrees = found.at(size + 2) == proof
    except _Differs:
        agrees = False
    if not agrees:
        raise CaptureError(
            f"the graph of {type(module).__name__} changes with the size of the batch (a number "
            "computed from it, or a branch on it): capture it at the one size that you need"
        )
    return found


def _resized(
    inputs: Mapping[str, Tensor], batched: Collection[str], size: int
) -> dict[str, Tensor]:
    """The inputs with their first row repeated to a batch of that size."""
    return {name: torch.cat([t[:1]] * size) if name in batched else t for name, t in inputs.items()}
