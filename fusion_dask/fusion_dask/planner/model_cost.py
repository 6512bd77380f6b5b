"""From a graph to what the planner has to know of it, and coarser views of that.

A block is what lies between two useful cut positions (`partition.candidates`). Bytes moved: an
operator reads its inputs and writes its outputs once; a view moves nothing; a backward moves twice
the bytes of its forward (it reads the upstream gradient and what was saved, and writes a gradient of
each). Working bytes: the gradients of the inputs and outputs of the largest operator, and the fresh
gradients of its parameters; what it reads is among the saved bytes or as large.

Not covered: bytes that an autograd of another device keeps. The exact memory of a stage program is
`graph.cost.stage_memory`; a plan for a real graph is checked with it (`plan.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final

from fusion_dask.graph.cut import boundary_bytes, cut, valid_positions
from fusion_dask.graph.ir import Graph, Kind, Operator, StageProgram
from fusion_dask.planner.partition import candidates
from fusion_dask.planner.records import BlockCost, ModelCost, TiedParameter

__all__ = ["merged_at", "model_cost"]

_VIEW_NAMES: Final = """
    alias broadcast_to chunk detach diagonal expand expand_as flatten movedim narrow permute reshape
    select slice split split_with_sizes squeeze swapaxes t transpose unbind unflatten unsqueeze view_as
"""
#: Operators that hand on the memory of their input.
VIEWS: Final = frozenset(_VIEW_NAMES.split())
#: Operators that read rows of a table instead of all of it.
LOOKUPS: Final = frozenset(["embedding", "embedding_bag", "index_select", "gather", "index"])


def model_cost(
    graph: Graph, *, tokens: int | None = None, name: str = "model", dtype: str | None = None
) -> ModelCost:
    """The cost of an annotated graph (`graph.cost.annotate`).

    Args:
        graph: The training graph.
        tokens: Tokens in the microbatch that it was captured for; by default the elements of the
            first input, the token ids of a language model.
        name: For people.
        dtype: Dtype of the matrix products, where autocast makes it another one than that of most
            parameters.
    """
    useful = candidates(graph, boundary_bytes(graph), frozenset(valid_positions(graph)))
    programs = cut(graph, useful)
    sizes = _sizes(graph)
    shared: dict[str, tuple[int, ...]] = {n: at for p in programs for n, at in p.shared}
    parameters = {p.name: p for p in graph.parameters}
    activations, gradients = _crossing(programs)
    return ModelCost(
        name=name,
        dtype=_main_dtype(graph) if dtype is None else dtype,
        tokens=graph.inputs[0].spec.numel if tokens is None else tokens,
        blocks=tuple(_block(p, sizes, shared) for p in programs),
        positions=useful,
        boundary_bytes=activations,
        gradient_boundary_bytes=gradients,
        tied=tuple(
            TiedParameter(
                name=n,
                parameters=parameters[n].spec.numel if parameters[n].trainable else 0,
                parameter_bytes=parameters[n].spec.bytes,
                gradient_bytes=parameters[n].spec.bytes if parameters[n].trainable else 0,
                blocks=at,
            )
            for n, at in shared.items()
        ),
    )


def merged_at(model: ModelCost, edges: Sequence[int]) -> ModelCost:
    """The same model in fewer blocks: block i becomes blocks `edges[i]` to `edges[i + 1]` - 1.

    Args:
        model: The model.
        edges: From 0 to the number of blocks, strictly ascending.
    """
    kept = [e - 1 for e in edges[1:-1]]
    where = {b: i for i, (a, z) in enumerate(pairwise(edges)) for b in range(a, z)}
    blocks = [_sum(model.blocks[a:z]) for a, z in pairwise(edges)]
    tied = []
    for parameter in model.tied:
        at = tuple(sorted({where[b] for b in parameter.blocks}))
        if len(at) > 1:
            tied.append(replace(parameter, blocks=at))
            continue
        blocks[at[0]] = replace(
            blocks[at[0]],
            parameters=blocks[at[0]].parameters + parameter.parameters,
            parameter_bytes=blocks[at[0]].parameter_bytes + parameter.parameter_bytes,
            gradient_bytes=blocks[at[0]].gradient_bytes + parameter.gradient_bytes,
        )
    return replace(
        model,
        blocks=tuple(blocks),
        positions=tuple(model.positions[k] for k in kept),
        boundary_bytes=tuple(model.boundary_bytes[k] for k in kept),
        gradient_boundary_bytes=tuple(model.gradient_boundary_bytes[k] for k in kept),
        tied=tuple(tied),
    )


def _sum(blocks: Sequence[BlockCost]) -> BlockCost:
    return BlockCost(
        name=blocks[0].name,
        forward_flops=sum(b.forward_flops for b in blocks),
        backward_flops=sum(b.backward_flops for b in blocks),
        forward_bytes=sum(b.forward_bytes for b in blocks),
        backward_bytes=sum(b.backward_bytes for b in blocks),
        streamed_bytes=sum(b.streamed_bytes for b in blocks),
        parameters=sum(b.parameters for b in blocks),
        parameter_bytes=sum(b.parameter_bytes for b in blocks),
        gradient_bytes=sum(b.gradient_bytes for b in blocks),
        saved_bytes=sum(b.saved_bytes for b in blocks),
        working_bytes=max(b.working_bytes for b in blocks),
    )


def _sizes(graph: Graph) -> dict[str, int]:
    """Bytes of every activation by its name; parameters, buffers and constants are not among them."""
    found = {v.name: v.spec.bytes for v in graph.inputs}
    for operator in graph.operators:
        found.update((v.name, v.spec.bytes) for v in operator.outputs if v is not None)
    return found


def _main_dtype(graph: Graph) -> str:
    numbers: dict[str, int] = {}
    for parameter in graph.parameters:
        spec = parameter.spec
        numbers[spec.dtype] = numbers.get(spec.dtype, 0) + spec.numel
    return max(numbers, key=lambda d: numbers[d], default="float32")


def _crossing(programs: Sequence[StageProgram]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Activation and gradient bytes that cross each cut, each value once a cut."""
    change = [[0] * (len(programs) + 1) for _ in range(2)]
    for program in programs:
        last: tuple[dict[str, int], dict[str, int]] = ({}, {})
        size: dict[str, int] = {}
        for port in program.sends:  # ascending: the last consumer wins
            for value in port.values:
                size[value.name] = value.spec.bytes
                last[0][value.name] = port.stage
                if value.grad:
                    last[1][value.name] = port.stage
        for row, ends in zip(change, last, strict=True):
            for name, end in ends.items():
                row[program.index] += size[name]
                row[end] -= size[name]
    activations, gradients = (tuple(accumulate(row))[: len(programs) - 1] for row in change)
    return activations, gradients


def _block(
    program: StageProgram, sizes: Mapping[str, int], shared: Mapping[str, object]
) -> BlockCost:
    own = [p for p in program.parameters if p.name not in shared]
    trained = [p for p in own if p.trainable]
    weights = {p.name: p.spec.bytes for p in program.parameters}
    moved = sum(_moved(o, sizes) for o in program.operators)
    differentiated = sum(_moved(o, sizes) for o in program.operators if _has_gradient(o))
    extra = sum(b.spec.bytes for b in program.buffers) + sum(
        c.spec.bytes for c in program.constants
    )
    return BlockCost(
        name=_name(program),
        forward_flops=sum(o.cost.flops_forward for o in program.operators),
        backward_flops=sum(o.cost.flops_backward for o in program.operators),
        forward_bytes=moved,
        backward_bytes=2 * differentiated,
        streamed_bytes=sum(
            weights.get(n, 0)
            for o in program.operators
            if _short(o) not in LOOKUPS
            for n in o.inputs
        ),
        parameters=sum(p.spec.numel for p in trained),
        parameter_bytes=sum(p.spec.bytes for p in own) + extra,
        gradient_bytes=sum(p.spec.bytes for p in trained),
        saved_bytes=sum(o.cost.saved_bytes for o in program.operators),
        working_bytes=max(
            _touched(o, sizes) + sum(weights.get(n, 0) for n in o.inputs) for o in program.operators
        ),
    )


def _name(program: StageProgram) -> str:
    """The module of the first operator that reads a parameter."""
    for operator in program.operators:
        if operator.kind is Kind.PARAMETRIC:
            return operator.module
    return program.operators[0].module


def _short(operator: Operator) -> str:
    return operator.target.split(".")[1]


def _touched(operator: Operator, sizes: Mapping[str, int]) -> int:
    """Bytes of the activations that an operator reads and writes."""
    read = sum(sizes.get(n, 0) for n in operator.inputs)
    return read + sum(v.spec.bytes for v in operator.outputs if v is not None)


def _moved(operator: Operator, sizes: Mapping[str, int]) -> int:
    return 0 if _short(operator) in VIEWS else _touched(operator, sizes)


def _has_gradient(operator: Operator) -> bool:
    return any(v is not None and v.grad for v in operator.outputs)
