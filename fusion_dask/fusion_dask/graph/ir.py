"""The intermediate representation: a model as a DAG of operators, and a stage as a slice of it.

Everything here is plain immutable data: no tensor, no torch module, no callable. A graph is what
`capture` makes of a model, a stage program is what `cut` makes of a graph and what travels to a
worker. Planes give them meaning.

Invariants (checked by `validate.validate_graph`):

- operators are in topological order, and every value has one producer;
- value names are unique across inputs, parameters, buffers, constants and operators;
- the graph is functional: no operator writes to its inputs. Buffer updates are outputs
  (`buffer_updates`) that a plane commits after the backward pass.

The paper (arXiv 2309.01172) asks for an IR but gives no schema; this one is this project's own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "DTYPE_BYTES",
    "Argument",
    "Buffer",
    "Constant",
    "Cost",
    "Graph",
    "InitStep",
    "Kind",
    "Operator",
    "Output",
    "Parameter",
    "Port",
    "Ref",
    "StageProgram",
    "Tag",
    "TensorSpec",
    "Value",
    "references",
]

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor; the dtype by its torch name without the prefix.

    >>> TensorSpec(shape=(4, 128, 256), dtype="bfloat16").bytes
    262144
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A named tensor of the graph. `grad`: a gradient flows back through it in training."""

    name: str
    spec: TensorSpec
    grad: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value, as an operator's argument."""

    name: str


@dataclass(frozen=True, slots=True)
class Tag:
    """A torch enumeration value as data: `Tag("dtype", "float32")`; `device` means the plane's own."""

    kind: str
    name: str


Argument = None | bool | int | float | str | Ref | Tag | tuple["Argument", ...]


def references(argument: Argument) -> Iterator[str]:
    """The value names inside an argument, in order.

    >>> list(references((Ref("a"), 1, (Ref("b"), None))))
    ['a', 'b']
    """
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


class Kind(StrEnum):
    """What an operator is to the planner.

    PARAMETRIC reads a parameter; LOSS belongs to the loss (it is downstream of a label);
    FREE is derived from inputs, constants and buffers alone, is cheap and not random, so that every
    stage that needs it computes it again instead of receiving it; STATELESS is the rest.
    """

    PARAMETRIC = "parametric"
    STATELESS = "stateless"
    FREE = "free"
    LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an operator costs for one microbatch. FLOPs count a multiply-add as two."""

    flops_forward: int = 0
    flops_backward: int = 0
    saved_bytes: int = 0  # kept from forward to backward, first saver of a storage pays


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of a core operator.

    Attributes:
        name: Unique name; that of its first output.
        target: The operator in torch's naming, e.g. `aten.linear.default`.
        args: Positional arguments.
        kwargs: Keyword arguments, sorted by name.
        outputs: The values that it produces, in order. An unused output is None.
        kind: What it is to the planner.
        random: It draws random numbers; a plane keys it by (run, step, microbatch, name).
        module: Path of the submodule that made it, e.g. `transformer.h.0.attn`.
        source: The line of the model that made it, for messages.
        cost: FLOPs and bytes for one microbatch.
    """

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[Value | None, ...]
    kind: Kind = Kind.STATELESS
    random: bool = False
    module: str = ""
    source: str = ""
    cost: Cost = field(default_factory=Cost)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads, each once, in order of first use."""
        names = [n for a in self.args for n in references(a)]
        names += [n for _, a in self.kwargs for n in references(a)]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class InitStep:
    """One in-place initialisation, replayed by name with a generator seeded per parameter.

    `op` is a name of `initialise.INIT_OPS` (normal_, uniform_, fill_, ...); `rows` limits it to a row
    range of axis 0 (the padding row of an embedding).
    """

    op: str
    args: tuple[float, ...] = ()
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter. Tied parameters appear once; `aliases` are its other names in the model."""

    name: str
    spec: TensorSpec
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    init: tuple[InitStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer of the model, e.g. a running mean. `persistent` ones belong to the state dict.

    Its first value comes from `init`, or from `data` (little-endian, contiguous) where no rule says.
    """

    name: str
    spec: TensorSpec
    persistent: bool = True
    init: tuple[InitStep, ...] = ()
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor baked into the graph; its bytes, little-endian and contiguous."""

    name: str
    spec: TensorSpec
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A result for the caller. The role `loss` is differentiated; all others are returned."""

    role: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A whole model for one microbatch.

    Parameter and buffer values carry the name of the parameter or buffer. `parameters` is in the
    order of `Module.named_parameters()`, which global sums follow.
    """

    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: tuple[Constant, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[Output, ...]
    buffer_updates: tuple[tuple[str, str], ...] = ()  # (buffer, value that replaces it)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Boundary tensors between a stage and one other stage, in one direction of the forward pass."""

    stage: int
    values: tuple[Value, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one microbatch's activations through this port."""
        return sum(v.spec.bytes for v in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """What one stage computes for one microbatch, and what it exchanges.

    Attributes:
        index: Position of the stage, from 0.
        count: Number of stages.
        inputs: User inputs that this stage reads itself (token ids, labels).
        parameters: Parameters that it holds. A tied parameter is held by every stage that reads it.
        shared: For each tied parameter held here, the stages that hold it, ascending; the first is
            the owner, whose value a checkpoint stores.
        buffers: Buffers that it holds.
        constants: Constants that its operators read.
        operators: In topological order.
        receives: Per producing stage, the values that arrive from it; ascending.
        sends: Per consuming stage, the values that leave for it; ascending.
        outputs: Results of the graph that this stage produces.
        buffer_updates: As in the graph.
    """

    index: int
    count: int
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    buffers: tuple[Buffer, ...] = ()
    constants: tuple[Constant, ...] = ()
    operators: tuple[Operator, ...]
    receives: tuple[Port, ...] = ()
    sends: tuple[Port, ...] = ()
    outputs: tuple[Output, ...] = ()
    buffer_updates: tuple[tuple[str, str], ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that this stage holds."""
        return sum(p.spec.bytes for p in self.parameters)

    @property
    def flops(self) -> int:
        """Forward and backward FLOPs of one microbatch."""
        return sum(o.cost.flops_forward + o.cost.flops_backward for o in self.operators)
