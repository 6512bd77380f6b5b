"""What follows from the structure of a graph: dead operators, kinds, gradients.

Pure functions from graph to graph; no torch. Kinds are defined in `ir.Kind`. A value carries a
gradient if a trainable parameter influences it and it influences the loss, both through
differentiable operators.
"""

from collections.abc import Mapping
from dataclasses import replace

from fusion_dask.graph.ir import Graph, Kind, Operator, Value

__all__ = ["MATRIX_OPERATORS", "finish", "producers"]

MATRIX_OPERATORS = frozenset(
    [
        "addbmm",
        "addmm",
        "addmv",
        "baddbmm",
        "bilinear",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "cdist",
        "dot",
        "einsum",
        "gru",
        "inner",
        "linear",
        "lstm",
        "matmul",
        "mm",
        "mv",
        "rnn_relu",
        "rnn_tanh",
        "scaled_dot_product_attention",
        "tensordot",
        "kron",
        "outer",
        "vdot",
    ]
)
"""Operators that cost enough never to be computed twice to save a transfer."""


def finish(graph: Graph, *, training: bool) -> Graph:
    """Drop dead operators and work out kinds, gradients and which parameters are trained."""
    live = _live(graph)
    kinds = _kinds(graph, live)
    gradients = _gradients(graph, live) if training else frozenset()
    has_loss = any(o.role == "loss" for o in graph.outputs)
    read = {name for o in live for name in o.inputs}
    read |= {output.value for output in graph.outputs}
    read |= {value for _, value in graph.buffer_updates}
    operators = tuple(
        replace(o, kind=kinds[o.name], outputs=_mark(o.outputs, gradients, read)) for o in live
    )
    parameters = graph.parameters
    if training and has_loss:
        # A parameter that the loss does not reach has no gradient, so no optimizer moves it.
        parameters = tuple(
            replace(p, trainable=p.trainable and p.name in gradients) for p in parameters
        )
    return replace(
        graph,
        operators=operators,
        parameters=parameters,
        constants=tuple(c for c in graph.constants if c.name in read),
    )


def producers(graph: Graph) -> dict[str, int]:
    """For each value that an operator makes, the position of the operator."""
    return {
        value.name: position
        for position, operator in enumerate(graph.operators)
        for value in operator.outputs
        if value is not None
    }


def _mark(
    outputs: tuple[Value | None, ...], gradients: frozenset[str], read: set[str]
) -> tuple[Value | None, ...]:
    return tuple(
        None if v is None or v.name not in read else replace(v, grad=v.name in gradients)
        for v in outputs
    )


def _live(graph: Graph) -> tuple[Operator, ...]:
    """Operators that an output or a buffer update needs."""
    needed = {o.value for o in graph.outputs} | {value for _, value in graph.buffer_updates}
    kept = []
    for operator in reversed(graph.operators):
        if any(v is not None and v.name in needed for v in operator.outputs):
            kept.append(operator)
            needed.update(operator.inputs)
    return tuple(reversed(kept))


def _base_name(operator: Operator) -> str:
    return operator.target.split(".")[1]


def _kinds(graph: Graph, live: tuple[Operator, ...]) -> Mapping[str, Kind]:
    parameters = {p.name for p in graph.parameters}
    mutated = {buffer for buffer, _ in graph.buffer_updates}
    free = {v.name for v in graph.inputs} | {c.name for c in graph.constants}
    free |= {b.name for b in graph.buffers if b.name not in mutated}
    from_inputs = {v.name for v in graph.inputs}
    kinds: dict[str, Kind] = {}
    for operator in live:
        inputs = set(operator.inputs)
        names = {v.name for v in operator.outputs if v is not None}
        if inputs & parameters:
            kinds[operator.name] = Kind.PARAMETRIC
        elif (
            inputs <= free and not operator.random and _base_name(operator) not in MATRIX_OPERATORS
        ):
            kinds[operator.name] = Kind.FREE
            free |= names
            if inputs & from_inputs:
                from_inputs |= names
        else:
            kinds[operator.name] = Kind.STATELESS
    for name in _loss_operators(graph, live, kinds, from_inputs):
        kinds[name] = Kind.LOSS
    return kinds


def _loss_operators(
    graph: Graph, live: tuple[Operator, ...], kinds: Mapping[str, Kind], from_inputs: set[str]
) -> frozenset[str]:
    """Operators of the loss: behind every parameter, and reading a label or what it went into."""
    behind = set(_before_no_parameter(graph, live, kinds))
    touched = set(from_inputs)
    found = set()
    for operator in live:
        if operator.name in behind and touched.intersection(operator.inputs):
            found.add(operator.name)
            touched.update(v.name for v in operator.outputs if v is not None)
    return frozenset(found)


def _before_no_parameter(
    graph: Graph, live: tuple[Operator, ...], kinds: Mapping[str, Kind]
) -> frozenset[str]:
    """Stateless operators that the loss needs and from which no parametric operator follows."""
    to_loss = {o.value for o in graph.outputs if o.role == "loss"}
    to_parameter: set[str] = set()
    found = set()
    for operator in reversed(live):
        names = {v.name for v in operator.outputs if v is not None}
        leads_on = bool(names & to_parameter)
        if kinds[operator.name] is Kind.PARAMETRIC or leads_on:
            to_parameter.update(operator.inputs)
        elif names & to_loss and kinds[operator.name] is Kind.STATELESS:
            found.add(operator.name)
        if names & to_loss:
            to_loss.update(operator.inputs)
    return frozenset(found)


def _gradients(graph: Graph, live: tuple[Operator, ...]) -> frozenset[str]:
    """Names of values (parameters included) through which a gradient of the loss flows."""
    depends = {p.name for p in graph.parameters if p.trainable}
    for operator in live:
        if _base_name(operator) != "detach" and depends.intersection(operator.inputs):
            depends.update(
                v.name
                for v in operator.outputs
                if v is not None and v.spec.dtype.startswith(("float", "bfloat", "complex"))
            )
    reaches = {o.value for o in graph.outputs if o.role == "loss"} & depends
    for operator in reversed(live):
        if any(v is not None and v.name in reaches for v in operator.outputs):
            reaches.update(depends.intersection(operator.inputs))
    return frozenset(reaches)
