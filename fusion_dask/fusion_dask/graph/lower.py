"""From the nodes of an exported program to operators of the IR.

Covers: arguments and outputs as data, `view` to `reshape` (strides differ between backends),
device arguments to the plane's own device, identities and assertions dropped, multi-output nodes
folded, and the source line of each operator. Kinds, gradients and dead operators are `analyse`'s.

Invariant: every operator made here is in the table of `operators`.
"""

import operator as python_operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram

from fusion_dask.errors import CaptureError
from fusion_dask.graph.explain import frame_of, short_source
from fusion_dask.graph.ir import DTYPE_BYTES, Argument, Operator, Ref, Tag, TensorSpec, Value
from fusion_dask.graph.operators import draws_random_numbers, is_allowed

__all__ = [
    "RegionLines",
    "detach_no_grad_regions",
    "operators_of",
    "region_lines",
    "spec_of",
    "tensor_bytes",
]

_RENAMED = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
    # Uninitialised memory is never a result; zeros are as good and show nobody's old data.
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.__and__.Tensor": "aten.bitwise_and.Tensor",
    "aten.__and__.Scalar": "aten.bitwise_and.Scalar",
    "aten.__or__.Tensor": "aten.bitwise_or.Tensor",
    "aten.__or__.Scalar": "aten.bitwise_or.Scalar",
}
_IDENTITIES = {"aten.alias.default", "aten.lift_fresh_copy.default"}
_ASSIGNED_NAME = re.compile(r"^\s*(\w+) = ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RegionLines:
    """Stack and module of nodes inside autocast and no-grad regions, by node name.

    Functionalising the graph replaces both by positions in generated code.
    """

    stacks: Mapping[str, tuple[str, str]]

    def stack_of(self, node: torch.fx.Node) -> str:
        """The recorded stack of the model's code."""
        found = str(node.meta.get("stack_trace") or "")
        return self._inner(found)[0] if "<eval_with_key>" in found else found

    def module_of(self, node: torch.fx.Node) -> str:
        """Path of the submodule that made the node."""
        found = str(node.meta.get("stack_trace") or "")
        if "<eval_with_key>" in found:
            return self._inner(found)[1]
        return _module_path(node)

    def _inner(self, generated: str) -> tuple[str, str]:
        names = _ASSIGNED_NAME.findall(generated)
        return self.stacks.get(names[-1], ("", "")) if names else ("", "")


def region_lines(exported: ExportedProgram) -> RegionLines:
    """Remember where the nodes of nested regions come from, before they are inlined."""
    return RegionLines(
        {
            node.name: (str(node.meta.get("stack_trace") or ""), _module_path(node))
            for part in _regions(exported)
            for node in part.graph.nodes
            if node.op == "call_function"
        }
    )


def detach_no_grad_regions(exported: ExportedProgram) -> None:
    """Put a detach on what leaves a no-grad region, which functionalising would forget."""
    for part in (exported.graph_module, *_regions(exported)):
        for node in part.graph.nodes:
            if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
                continue
            if node.args[0] is False:
                _detach_outputs(getattr(part, node.args[1].target))


def _regions(exported: ExportedProgram) -> Iterable[torch.fx.GraphModule]:
    for path, part in exported.graph_module.named_modules():
        if path and isinstance(part, torch.fx.GraphModule):
            yield part


def _detach_outputs(part: torch.fx.GraphModule) -> None:
    output = next(n for n in part.graph.nodes if n.op == "output")
    results = []
    for result in output.args[0]:
        value = result.meta.get("val") if isinstance(result, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            with part.graph.inserting_before(output):
                detached = part.graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta.update(result.meta)
            results.append(detached)
        else:
            results.append(result)
    output.args = (tuple(results),)
    part.recompile()


def spec_of(value: object, node: torch.fx.Node | None) -> TensorSpec:
    """Shape and dtype of a tensor, as data."""
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"{frame_of(node)} makes a {type(value).__name__}, not a tensor of fixed size: keep "
            "numbers that depend on tensors as tensors"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise CaptureError(
            f"{frame_of(node)} has dtype {dtype}, which no plane supports: use one of "
            f"{', '.join(DTYPE_BYTES)}"
        )
    if not all(type(size) is int for size in value.shape):
        raise CaptureError(
            f"{frame_of(node)} makes a tensor whose size depends on the values of another: keep "
            "sizes fixed (a mask instead of a selection)"
        )
    return TensorSpec(shape=tuple(value.shape), dtype=dtype)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, little-endian and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def operators_of(
    graph: torch.fx.Graph, names: Mapping[str, str], lines: RegionLines
) -> tuple[tuple[Operator, ...], dict[str, str]]:
    """The operators of a functional graph, and for every node the value that it stands for.

    Args:
        graph: Functionalised graph of an exported program.
        names: Value names of the placeholders.
        lines: Where the nodes of nested regions come from.
    """
    lowering = _Lowering(taken=frozenset(names.values()), lines=lines, values=dict(names))
    for node in graph.nodes:
        if node.op == "call_function":
            lowering.add(node)
        elif node.op == "get_attr":
            raise CaptureError(
                f"{frame_of(node)} uses {node.target!r}: control flow operators are not supported "
                "in a graph; choose with torch.where"
            )
    return tuple(lowering.finish()), lowering.values


@dataclass(slots=True)
class _Lowering:
    """The values seen so far and the operators made of them."""

    taken: frozenset[str]
    lines: RegionLines
    values: dict[str, str]
    made: list[Operator] | None = None

    def add(self, node: torch.fx.Node) -> None:
        if self.made is None:
            self.made = []
        if node.target is python_operator.getitem:
            self._item(node)
            return
        if "_assert" in str(node.target) or "sym_constrain" in str(node.target):
            return
        target = _RENAMED.get(str(node.target), str(node.target))
        if target in _IDENTITIES or _is_idle_dropout(node):
            self.values[node.name] = self._reference(node.args[0]).name
            return
        if not isinstance(node.target, torch._ops.OpOverload) or not is_allowed(target):
            raise CaptureError(
                f"{frame_of(node)} uses the operator {target}, which is not in the table of graph "
                "operators: write that line with standard torch operators"
            )
        name = node.name if node.name not in self.taken else f"{node.name}.0"
        made = Operator(
            name=name,
            target=target,
            args=tuple(self._argument(a, node) for a in node.args),
            kwargs=tuple(
                (key, self._argument(value, node))
                for key, value in sorted(node.kwargs.items())
                if key != "pin_memory"
            ),
            outputs=_outputs(name, node),
            module=self.lines.module_of(node),
            source=short_source(self.lines.stack_of(node)),
        )
        self.values[node.name] = name
        self.made.append(replace(made, random=draws_random_numbers(made)))

    def finish(self) -> Sequence[Operator]:
        return self.made or ()

    def _item(self, node: torch.fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, torch.fx.Node)
        assert isinstance(index, int)
        base = self.values[source.name]
        self.values[node.name] = base if index == 0 else f"{base}.{index}"

    def _reference(self, node: Any) -> Ref:  # noqa: ANN401 - an argument of a graph node
        return Ref(self.values[node.name])

    def _argument(self, value: Any, node: torch.fx.Node) -> Argument:  # noqa: ANN401
        if isinstance(value, torch.fx.Node):
            if isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise CaptureError(
                    f"{frame_of(node)} turns a tensor into a Python number: keep it a tensor"
                )
            return self._reference(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item, node) for item in value)
        if isinstance(value, torch.device):
            return Tag("device", "self")
        for kind in (torch.dtype, torch.layout, torch.memory_format):
            if isinstance(value, kind):
                return Tag(kind.__name__, str(value).removeprefix("torch."))
        raise CaptureError(
            f"{frame_of(node)} passes a {type(value).__name__} to {node.target}: a graph holds "
            "tensors, numbers and dtypes only"
        )


def _is_idle_dropout(node: torch.fx.Node) -> bool:
    """Dropout outside training returns its input."""
    if str(node.target) != "aten.dropout.default":
        return False
    _, p, training = node.args
    return training is False or p in (0, 0.0)


def _outputs(name: str, node: torch.fx.Node) -> tuple[Value | None, ...]:
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return (Value(name=name, spec=spec_of(value, node)),)
    used = {user.args[1] for user in node.users if user.target is python_operator.getitem}
    return tuple(
        Value(name=name if i == 0 else f"{name}.{i}", spec=spec_of(item, node))
        if i in used
        else None
        for i, item in enumerate(value)
    )


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return str(list(stack.values())[-1][0])
