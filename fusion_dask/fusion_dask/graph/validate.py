"""Check that a graph or a stage program makes sense before anything of it is used.

Covers: names and references, order, allowed operators and tags, arguments against operator
schemas, sizes, and that what each operator makes has the declared shape (`infer`). Pure: nothing
of the program is executed on real data.

Invariant: a program that passes computes with listed operators on tensors of the declared sizes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fusion_dask.errors import ProgramError
from fusion_dask.graph.infer import check_shapes, leaves
from fusion_dask.graph.initialise import INIT_OPS
from fusion_dask.graph.ir import (
    DTYPE_BYTES,
    Argument,
    Buffer,
    Constant,
    Graph,
    Operator,
    Parameter,
    StageProgram,
    Tag,
    TensorSpec,
    Value,
)
from fusion_dask.graph.operators import draws_random_numbers, resolve, schema, tag_value

__all__ = ["LIMITS", "Limits", "validate_graph", "validate_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large a program may be. Larger ones are refused before they are read further."""

    packed_bytes: int = 64 << 20
    text_bytes: int = 128 << 20
    operators: int = 200_000
    rank: int = 12
    numel: int = 1 << 36


LIMITS = Limits()


def validate_graph(graph: Graph) -> None:
    """Raise ProgramError unless the graph is well formed."""
    _validate(graph, received=())
    known = _known(graph, ())
    for name in [o.value for o in graph.outputs] + [v for _, v in graph.buffer_updates]:
        _require(name in known, f"result {name!r} is made by nothing")


def validate_program(program: StageProgram) -> None:
    """Raise ProgramError unless the stage program is well formed."""
    _require(0 <= program.index < program.count <= 65536, "the stage number is out of range")
    received = [value for port in program.receives for value in port.values]
    _validate(program, received=received)
    known = _known(program, received)
    sent = [v.name for port in program.sends for v in port.values]
    results = [o.value for o in program.outputs] + [v for _, v in program.buffer_updates]
    for name in sent + results:
        _require(name in known, f"result {name!r} is made by nothing")
    before = [port.stage for port in program.receives]
    after = [port.stage for port in program.sends]
    _require(_ascending([*before, program.index, *after]), "the ports are out of order")
    _require(all(0 <= s < program.count for s in before + after), "a port leads nowhere")
    parameters = {p.name for p in program.parameters}
    for name, stages in program.shared:
        _require(
            name in parameters and program.index in stages and _ascending(stages),
            f"shared parameter {name!r} is inconsistent",
        )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ProgramError(f"the program is malformed: {what}; it is damaged or was tampered with")


def _ascending(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def _validate(program: Graph | StageProgram, *, received: Iterable[Value]) -> None:
    _require(len(program.operators) <= LIMITS.operators, "it has too many operators")
    arriving = tuple(received)
    for spec in _specs(program, arriving):
        _check_spec(spec)
    _check_gradients(program, arriving)
    _check_data(program.constants, program.buffers)
    stateful: list[Parameter | Buffer] = [*program.parameters, *program.buffers]
    for part in stateful:
        _check_init(part)
    buffers = {b.name for b in program.buffers}
    for name, _ in program.buffer_updates:
        _require(name in buffers, f"update of an unknown buffer {name!r}")
    known = _leaves(program, arriving)
    for operator in program.operators:
        _check_operator(operator, known)
        for value in operator.outputs:
            if value is not None:
                _require(value.name not in known, f"two values are named {value.name!r}")
                known.add(value.name)
    check_shapes(program, arriving)


def _leaves(program: Graph | StageProgram, received: Iterable[Value]) -> set[str]:
    known: set[str] = set()
    for part in leaves(program, received):
        _require(part.name not in known, f"two values are named {part.name!r}")
        known.add(part.name)
    return known


def _known(program: Graph | StageProgram, received: Iterable[Value]) -> set[str]:
    known = _leaves(program, received)
    known.update(v.name for o in program.operators for v in o.outputs if v is not None)
    return known


def _specs(program: Graph | StageProgram, received: Iterable[Value]) -> Iterator[TensorSpec]:
    for part in leaves(program, received):
        yield part.spec
    for operator in program.operators:
        for output in operator.outputs:
            if output is not None:
                yield output.spec


def _check_spec(spec: TensorSpec) -> None:
    _require(spec.dtype in DTYPE_BYTES, f"dtype {spec.dtype[:40]!r} is unknown")
    _require(len(spec.shape) <= LIMITS.rank, "a tensor has too many dimensions")
    _require(all(size >= 0 for size in spec.shape), "a tensor has a negative size")
    _require(spec.numel <= LIMITS.numel, "a tensor is too large")


def _check_gradients(program: Graph | StageProgram, received: Iterable[Value]) -> None:
    made = [v for o in program.operators for v in o.outputs if v is not None]
    for value in (*program.inputs, *received, *made):
        _require(
            not value.grad or value.spec.dtype.startswith(("float", "bfloat", "complex")),
            f"value {value.name!r} of integers cannot carry a gradient",
        )


def _check_data(constants: Iterable[Constant], buffers: Iterable[Buffer]) -> None:
    filled: list[Constant | Buffer] = [*constants, *(b for b in buffers if b.data)]
    for part in filled:
        _require(len(part.data) == part.spec.bytes, f"the data of {part.name!r} has a wrong size")


def _check_init(part: Parameter | Buffer) -> None:
    for step in part.init:
        _require(
            step.op in INIT_OPS and len(step.args) == INIT_OPS[step.op],
            f"the initialisation of {part.name!r} is unknown",
        )
        rows = part.spec.shape[0] if part.spec.shape else 0
        _require(
            step.rows is None or 0 <= step.rows[0] < step.rows[1] <= rows,
            f"the initialisation of {part.name!r} is out of range",
        )


def _check_operator(operator: Operator, known: set[str]) -> None:
    resolve(operator.target)
    for name in operator.inputs:
        _require(name in known, f"operator {operator.name!r} reads {name!r} before it is made")
    _require(
        operator.random == draws_random_numbers(operator),
        f"operator {operator.name!r} hides that it is random",
    )
    _require(bool(operator.outputs), f"operator {operator.name!r} makes nothing")
    for argument in (*operator.args, *(value for _, value in operator.kwargs)):
        _check_tags(argument)
    arguments = schema(operator.target).arguments
    positional = [a for a in arguments if not a.kwarg_only]
    names = {a.name for a in arguments}
    given = {a.name for a in positional[: len(operator.args)]} | {k for k, _ in operator.kwargs}
    required = {a.name for a in arguments if not a.has_default_value()}
    keys = [key for key, _ in operator.kwargs]
    _require(
        len(operator.args) <= len(positional)
        and len(set(keys)) == len(keys)
        and not {a.name for a in positional[: len(operator.args)]} & set(keys)
        and set(keys) <= names
        and required <= given,
        f"operator {operator.name!r} has arguments that {operator.target} does not take",
    )


def _check_tags(argument: Argument) -> None:
    if isinstance(argument, Tag):
        tag_value(argument, "meta")
    elif isinstance(argument, tuple):
        for item in argument:
            _check_tags(item)
