"""Capture: a torch module with its loss becomes a `Graph`, by `torch.export`.

The route is the training IR (dropout and buffer updates kept), functionalised without decomposing
the high-level operators. It runs on meta tensors as well as on real ones, so that a model larger
than this machine can be captured. The shapes are those of the example inputs.

Not covered: control flow that depends on the values of tensors. Every refusal is a `CaptureError`
that names the line of the model.

Invariant: the module is left as it was found: training mode, hooks, parameters and buffers.
"""

import dataclasses
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from fusion_dask.errors import CaptureError
from fusion_dask.graph import analyse, initialise, lower
from fusion_dask.graph.explain import explain, frame_of
from fusion_dask.graph.ir import Buffer, Constant, Graph, Output, Parameter, Value

__all__ = ["capture"]

_CHATTY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")

_Names = dict[str, str]  # placeholder of the exported program -> value name


def capture(
    module: nn.Module, example_inputs: Mapping[str, Tensor], *, training: bool = True
) -> Graph:
    """Capture one call of a module as a graph.

    Args:
        module: On meta or real tensors. Its forward takes the example inputs by name and returns a
            scalar loss (role `loss`), or a dict, tuple or dataclass of tensors: roles are then the
            names, or `output0`, `output1`, ...; the role `loss` is differentiated.
        example_inputs: One microbatch, on the module's device; only shapes and dtypes matter.
        training: Capture in training mode (dropout, updates of buffers); else in evaluation mode,
            where no value carries a gradient.

    Returns:
        The graph, with kinds and gradients worked out and costs still zero (see `cost.annotate`).

    Raises:
        CaptureError: Naming the line of the model that cannot be captured and what to do about it.
    """
    _check_inputs(module, example_inputs)
    inits = initialise.record(module) if training else {}
    with _mode(module, training), _dataclass_outputs(module):
        exported = _export(module, example_inputs)
    lines = lower.region_lines(exported)
    lower.detach_no_grad_regions(exported)
    try:
        with _quiet():
            exported = exported.run_decompositions({})
    except Exception as error:
        raise explain(module, error) from error
    return _assemble(module, exported, lines, inits, training=training)


def _check_inputs(module: nn.Module, example_inputs: Mapping[str, Tensor]) -> None:
    accepted = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for name, value in example_inputs.items():
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"example input {name!r} is a {type(value).__name__}: give a tensor, and make "
                "options that are not tensors attributes of the module"
            )
        if name not in accepted and not takes_any:
            raise CaptureError(
                f"{type(module).__name__}.forward takes no input {name!r}; it takes "
                f"{', '.join(accepted)}: name the example inputs accordingly"
            )
    missing = [
        name
        for name, p in accepted.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and name not in example_inputs
    ]
    if missing:
        raise CaptureError(
            f"{type(module).__name__}.forward needs {', '.join(missing)}: give an example of each"
        )


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; each submodule gets its own flag back."""
    before = [(m, m.training) for m in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in before:
            part.training = flag


@contextmanager
def _dataclass_outputs(module: nn.Module) -> Iterator[None]:
    """Let a forward return a plain dataclass, which export does not know."""

    def convert(_module: nn.Module, _args: object, output: object) -> object:
        if dataclasses.is_dataclass(output) and not isinstance(output, (Mapping, type)):
            return {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
        return output

    handle = module.register_forward_hook(convert)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch says about itself during export: a failure is told by our own error.

    torch 2.13 warns of its own deprecated calls, logs each guard and prints the graph so far.
    """
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\..*")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _export(module: nn.Module, example_inputs: Mapping[str, Tensor]) -> ExportedProgram:
    # Cloned: aliased inputs such as (ids, ids) would silently merge into one.
    inputs = {name: value.detach().clone() for name, value in example_inputs.items()}
    try:
        with _quiet():
            return torch.export.export(module, (), inputs, strict=False)
    except Exception as error:
        raise explain(module, error) from error


def _assemble(
    module: nn.Module,
    exported: ExportedProgram,
    lines: lower.RegionLines,
    inits: Mapping[str, initialise.Steps],
    *,
    training: bool,
) -> Graph:
    parameters, canonical = _parameters(module, inits)
    mutated = set(_mutations(exported).values())
    buffers, constants = _tensors(module, exported, mutated, inits)
    names = _value_names(exported, canonical)
    inputs = tuple(
        Value(name=names[n.name], spec=lower.spec_of(n.meta["val"], n))
        for n in exported.graph.nodes
        if n.op == "placeholder" and names.get(n.name) == n.name and _is_user_input(exported, n)
    )
    operators, resolved = lower.operators_of(exported.graph, names, lines)
    outputs = _outputs(exported, resolved)
    updates = tuple(
        (buffer, resolved[name]) for name, buffer in sorted(_mutations(exported).items())
    )
    graph = Graph(
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        operators=operators,
        outputs=outputs,
        buffer_updates=tuple(sorted(updates)),
    )
    _check_names(graph)
    return analyse.finish(graph, training=training)


def _is_user_input(exported: ExportedProgram, node: torch.fx.Node) -> bool:
    return node.name in exported.graph_signature.user_inputs


def _parameters(
    module: nn.Module, inits: Mapping[str, initialise.Steps]
) -> tuple[tuple[Parameter, ...], _Names]:
    """Parameters with their other names, and for every name the canonical one."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    canonical: _Names = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        key = initialise.storage_key(tensor)
        owner = first.setdefault(key, name)
        canonical[name] = owner
        tensors.setdefault(owner, tensor)
        aliases.setdefault(owner, [])
        if name != owner:
            aliases[owner].append(name)
    return tuple(
        Parameter(
            name=name,
            spec=lower.spec_of(tensor, None),
            trainable=tensor.requires_grad,
            aliases=tuple(aliases[name]),
            init=inits.get(name, ()),
        )
        for name, tensor in tensors.items()
    ), canonical


def _mutations(exported: ExportedProgram) -> _Names:
    """Output node -> buffer that it replaces; refuses what a pipeline cannot replay."""
    found: _Names = {}
    for spec in exported.graph_signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            assert spec.target is not None
            found[spec.arg.name] = spec.target
        elif spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            raise CaptureError(
                f"the model writes in place to {spec.target or spec.arg.name!r}, which is not a "
                "buffer: return a new tensor instead, or register it with register_buffer"
            )
    return found


def _tensors(
    module: nn.Module,
    exported: ExportedProgram,
    mutated: set[str],
    inits: Mapping[str, initialise.Steps],
) -> tuple[tuple[Buffer, ...], tuple[Constant, ...]]:
    """Buffers that belong to the state, and tensors that are part of the program."""
    buffers, constants = [], []
    used = {n.name for n in exported.graph.nodes if n.op == "placeholder" and n.users}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.arg.name in used:
            assert spec.target is not None
            constants.append(_constant(spec.target, exported.constants[spec.target]))
        elif spec.kind is InputKind.BUFFER:
            assert spec.target is not None
            tensor = module.get_buffer(spec.target)
            if spec.persistent or spec.target in mutated:
                buffers.append(
                    Buffer(
                        name=spec.target,
                        spec=lower.spec_of(tensor, None),
                        persistent=bool(spec.persistent),
                        init=(init := inits.get(spec.target, ())),
                        data=b"" if init or tensor.is_meta else lower.tensor_bytes(tensor),
                    )
                )
            elif spec.arg.name in used:
                constants.append(_constant(spec.target, tensor))
        elif spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            raise CaptureError(
                f"the model uses the object {spec.target!r}, which is not a tensor: a graph holds "
                "tensors only"
            )
    return tuple(buffers), tuple(constants)


def _constant(name: str, tensor: Tensor) -> Constant:
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        raise CaptureError(
            f"{name!r} is a tensor of the model that is neither a parameter nor part of its state "
            "dict, and its value is unknown on the meta device: build that one on the CPU"
        )
    return Constant(name=name, spec=lower.spec_of(tensor, None), data=lower.tensor_bytes(tensor))


def _value_names(exported: ExportedProgram, canonical: _Names) -> _Names:
    names: _Names = {}
    for spec in exported.graph_signature.input_specs:
        arg = spec.arg
        if spec.kind is InputKind.USER_INPUT:
            names[arg.name] = arg.name
        elif spec.kind is InputKind.PARAMETER:
            assert spec.target is not None
            names[arg.name] = canonical[spec.target]
        elif spec.target is not None:
            names[arg.name] = spec.target
    return names


def _outputs(exported: ExportedProgram, resolved: Mapping[str, str]) -> tuple[Output, ...]:
    """Roles from the structure that forward returned."""
    node = next(n for n in exported.graph.nodes if n.op == "output")
    skip = len(_mutations(exported))
    leaves = list(node.args[0])[skip:]
    assert exported.call_spec.out_spec is not None
    tree: Any = pytree.tree_unflatten(leaves, exported.call_spec.out_spec)
    if isinstance(tree, torch.fx.Node):
        scalar = lower.spec_of(tree.meta["val"], tree).shape == ()
        found = [("loss" if scalar else "output0", tree)]
    elif isinstance(tree, Mapping):
        found = list(tree.items())
    elif isinstance(tree, (tuple, list)):
        found = [(f"output{i}", leaf) for i, leaf in enumerate(tree)]
    else:
        raise CaptureError(f"forward returned a {type(tree).__name__}: return tensors")
    outputs = []
    for role, leaf in found:
        if leaf is None:
            continue
        if not isinstance(leaf, torch.fx.Node):
            raise CaptureError(
                f"output {role!r} is a {type(leaf).__name__}: return a flat dict or tuple of tensors"
            )
        spec = lower.spec_of(leaf.meta["val"], leaf)
        if role == "loss" and (spec.shape != () or "float" not in spec.dtype):
            raise CaptureError(
                f"the loss has shape {spec.shape} and dtype {spec.dtype} ({frame_of(leaf)}): "
                "return a floating-point scalar, for example its mean"
            )
        outputs.append(Output(role=str(role), value=resolved[leaf.name]))
    return tuple(outputs)


def _check_names(graph: Graph) -> None:
    seen: set[str] = {p.name for p in graph.parameters}
    rest = [v.name for v in graph.inputs] + [b.name for b in graph.buffers]
    for name in rest + [c.name for c in graph.constants]:
        if name in seen:
            raise CaptureError(
                f"{name!r} names both an input and a parameter or buffer of the model: rename the "
                "argument of forward"
            )
        seen.add(name)
