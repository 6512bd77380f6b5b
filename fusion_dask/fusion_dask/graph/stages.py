"""Build the stage programs of a graph once each operator has a stage.

Covers: who holds which parameter, buffer and constant, which FREE operators are repeated where,
and which values travel between which stages. Where the line runs is `cut`'s.

Invariant: every value that a stage reads is its own input, parameter, buffer or constant, made by
one of its operators, or received.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fusion_dask.graph.analyse import producers
from fusion_dask.graph.ir import Graph, Kind, Operator, Output, Port, StageProgram, Value

__all__ = ["build_stages"]


@dataclass(slots=True)
class _Stage:
    """What a stage is known to need so far."""

    operators: set[int] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    outputs: list[Output] = field(default_factory=list)
    updates: list[tuple[str, str]] = field(default_factory=list)


def build_stages(graph: Graph, stages: Sequence[int], count: int) -> tuple[StageProgram, ...]:
    """Stage programs for a graph.

    Args:
        graph: The graph.
        stages: For each operator its stage; ignored for FREE operators.
        count: Number of stages.
    """
    producer = producers(graph)
    parts = [_Stage() for _ in range(count)]
    for position, operator in enumerate(graph.operators):
        if operator.kind is not Kind.FREE:
            parts[stages[position]].operators.add(position)
    _assign_results(graph, stages, producer, parts)
    for part in parts:
        _repeat_free(graph, producer, part)
    _assign_unread(graph, parts)
    ports = _ports(graph, producer, stages, parts)
    held = {
        p.name: tuple(i for i, part in enumerate(parts) if p.name in part.reads)
        for p in graph.parameters
    }
    return tuple(_program(graph, i, parts, ports, held) for i in range(count))


def _assign_results(
    graph: Graph, stages: Sequence[int], producer: dict[str, int], parts: list[_Stage]
) -> None:
    """Outputs and buffer updates belong to the stage that makes them."""

    def home(value: str, default: int) -> int:
        return stages[producer[value]] if value in producer else default

    readers = _first_readers(graph, stages)
    for output in graph.outputs:
        at = home(output.value, readers.get(output.value, len(parts) - 1))
        parts[at].outputs.append(output)
    for buffer, value in graph.buffer_updates:
        at = readers.get(buffer, home(value, len(parts) - 1))
        parts[at].updates.append((buffer, value))


def _first_readers(graph: Graph, stages: Sequence[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for position, operator in enumerate(graph.operators):
        for name in operator.inputs:
            found[name] = min(stages[position], found.get(name, stages[position]))
    return found


def _repeat_free(graph: Graph, producer: dict[str, int], part: _Stage) -> None:
    """Add the FREE operators that a stage needs, and note all names that it reads."""
    part.reads.update(output.value for output in part.outputs)
    part.reads.update(name for update in part.updates for name in update)
    waiting = list(part.reads)
    for position in part.operators:
        waiting.extend(graph.operators[position].inputs)
    while waiting:
        name = waiting.pop()
        part.reads.add(name)
        source = producer.get(name)
        if source is None or source in part.operators:
            continue
        if graph.operators[source].kind is Kind.FREE:
            part.operators.add(source)
            waiting.extend(graph.operators[source].inputs)


def _assign_unread(graph: Graph, parts: list[_Stage]) -> None:
    """State that nothing reads lives in the first stage, so that checkpoints are complete."""
    read = {name for part in parts for name in part.reads}
    parts[0].reads.update(p.name for p in graph.parameters if p.name not in read)
    parts[0].reads.update(b.name for b in graph.buffers if b.name not in read)


def _ports(
    graph: Graph, producer: dict[str, int], stages: Sequence[int], parts: list[_Stage]
) -> dict[tuple[int, int], tuple[Value, ...]]:
    """Values that travel, by (producing stage, consuming stage), in the order of production."""
    found: dict[tuple[int, int], tuple[Value, ...]] = {}
    for consumer, part in enumerate(parts):
        graded = _graded_reads(graph, part)
        for position in sorted({producer[n] for n in part.reads if n in producer}):
            if position in part.operators:
                continue
            values = tuple(
                replace(v, grad=v.grad and v.name in graded)
                for v in graph.operators[position].outputs
                if v is not None and v.name in part.reads
            )
            key = (stages[position], consumer)
            found[key] = found.get(key, ()) + values
    return found


def _graded_reads(graph: Graph, part: _Stage) -> set[str]:
    """Names through which a gradient comes back from this stage.

    A value may carry a gradient in the graph and yet have none from a stage that only reports it.
    """
    return {
        name
        for position in part.operators
        if any(v is not None and v.grad for v in graph.operators[position].outputs)
        for name in graph.operators[position].inputs
    }


def _program(
    graph: Graph,
    index: int,
    parts: Sequence[_Stage],
    ports: dict[tuple[int, int], tuple[Value, ...]],
    held: dict[str, tuple[int, ...]],
) -> StageProgram:
    part = parts[index]
    operators = tuple(graph.operators[i] for i in sorted(part.operators))
    arriving = [(a, values) for (a, b), values in sorted(ports.items()) if b == index]
    leaving = [(b, values) for (a, b), values in sorted(ports.items()) if a == index]
    sent = {v.name for _, values in leaving for v in values}
    return StageProgram(
        index=index,
        count=len(parts),
        inputs=tuple(v for v in graph.inputs if v.name in part.reads),
        parameters=tuple(p for p in graph.parameters if p.name in part.reads),
        shared=tuple((name, at) for name, at in held.items() if index in at and len(at) > 1),
        buffers=tuple(b for b in graph.buffers if b.name in part.reads),
        constants=tuple(c for c in graph.constants if c.name in part.reads),
        operators=tuple(_without_unread(o, part, sent) for o in operators),
        receives=tuple(Port(stage=a, values=values) for a, values in arriving),
        sends=tuple(Port(stage=b, values=values) for b, values in leaving),
        outputs=tuple(part.outputs),
        buffer_updates=tuple(part.updates),
    )


def _without_unread(operator: Operator, part: _Stage, sent: Iterable[str]) -> Operator:
    """An output that neither this stage nor a later one reads is not kept here."""
    keep = part.reads.union(sent)
    outputs = tuple(v if v is not None and v.name in keep else None for v in operator.outputs)
    return operator if outputs == operator.outputs else replace(operator, outputs=outputs)
