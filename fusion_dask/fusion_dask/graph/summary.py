"""A cut graph in numbers and blocks, for people: what a table and a picture of it show.

Covers: one row a stage, and the stage's operators gathered into blocks, runs of operators that the
same submodule made. FREE operators belong to no block. Units are in the names.

Invariant: equal programs give equal summaries.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusion_dask.graph.cost import StageMemory, stage_memory
from fusion_dask.graph.ir import Kind, Operator, StageProgram

__all__ = ["Block", "StageRow", "block_edges", "blocks", "stage_rows", "to_json"]

ADAM_BYTES = 8
"""Bytes of optimizer state for each trainable number: two float32 moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage in numbers, for one microbatch where it applies."""

    stage: int
    first_module: str
    last_module: str
    operators: int
    parameters: int
    flops: int
    sent_bytes: int
    microbatches_in_flight: int
    memory: StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive operators of one stage that the same submodule made."""

    stage: int
    module: str
    operators: tuple[str, ...]
    kind: Kind
    parameters: int
    flops: int


def stage_rows(programs: Sequence[StageProgram]) -> tuple[StageRow, ...]:
    """One row a stage; memory is that of 1F1B with enough microbatches, and Adam."""
    rows = []
    for program in programs:
        modules = [b.module for b in blocks(program) if b.module]
        in_flight = program.count - program.index
        rows.append(
            StageRow(
                stage=program.index,
                first_module=modules[0] if modules else "",
                last_module=modules[-1] if modules else "",
                operators=len(program.operators),
                parameters=sum(p.spec.numel for p in program.parameters),
                flops=program.flops,
                sent_bytes=sum(port.bytes for port in program.sends),
                microbatches_in_flight=in_flight,
                memory=stage_memory(
                    program,
                    microbatches_in_flight=in_flight,
                    optimizer_bytes_per_parameter=ADAM_BYTES,
                ),
            )
        )
    return tuple(rows)


def blocks(program: StageProgram) -> tuple[Block, ...]:
    """The blocks of a stage, in order."""
    sizes = {p.name: p.spec.numel for p in program.parameters}
    return tuple(_block(program.index, run, sizes) for run in _runs(program))


def block_edges(programs: Sequence[StageProgram]) -> dict[tuple[int, int], int]:
    """Bytes from block to block, blocks numbered through all stages."""
    producer: dict[str, int] = {}
    sizes: dict[str, int] = {}
    edges: dict[tuple[int, int], set[str]] = {}
    for number, run in enumerate(run for p in programs for run in _runs(p)):
        for operator in run:
            for name in operator.inputs:
                source = producer.get(name, number)
                if source != number:
                    edges.setdefault((source, number), set()).add(name)
            for value in operator.outputs:
                if value is not None:
                    producer[value.name] = number
                    sizes[value.name] = value.spec.bytes
    return {edge: sum(sizes[name] for name in names) for edge, names in edges.items()}


def to_json(programs: Sequence[StageProgram]) -> dict[str, Any]:
    """Rows, blocks and edges as JSON values."""
    numbered = [block for program in programs for block in blocks(program)]
    return {
        "stages": [
            {**asdict(row), "memory": {**asdict(row.memory), "total": row.memory.total}}
            for row in stage_rows(programs)
        ],
        "blocks": [asdict(block) for block in numbered],
        "edges": [
            {"source": source, "target": target, "bytes": size}
            for (source, target), size in sorted(block_edges(programs).items())
        ],
    }


def _runs(program: StageProgram) -> Iterator[list[Operator]]:
    run: list[Operator] = []
    for operator in program.operators:
        if operator.kind is Kind.FREE:
            continue
        if run and (run[-1].module, run[-1].kind is Kind.LOSS) != (
            operator.module,
            operator.kind is Kind.LOSS,
        ):
            yield run
            run = []
        run.append(operator)
    if run:
        yield run


def _block(stage: int, run: Sequence[Operator], sizes: Mapping[str, int]) -> Block:
    read = dict.fromkeys(name for o in run for name in o.inputs if name in sizes)
    kinds = {o.kind for o in run}
    order = (Kind.LOSS, Kind.PARAMETRIC, Kind.STATELESS)
    return Block(
        stage=stage,
        module=run[0].module,
        operators=tuple(o.target.split(".")[1] for o in run),
        kind=next(kind for kind in order if kind in kinds),
        parameters=sum(sizes[name] for name in read),
        flops=sum(o.cost.flops_forward + o.cost.flops_backward for o in run),
    )
