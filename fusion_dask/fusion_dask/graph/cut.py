"""Cut a graph into stages at operator boundaries.

A cut position `i` puts operators before `i` on the left. Two rules bend the line: a FREE operator
(masks, positions, rotary tables) is repeated in every stage that needs it instead of being
shipped, and an operator that depends on parameters alone (a cast weight) goes with its first
consumer, so that weights do not cross.

Covers: boundary bytes of every position, the stage programs for given positions, and cutting
another capture of the same model along the same parameters. Which positions are good is the
planner's business.

Invariants: a value crosses a boundary at most once per consuming stage, straight from its
producer; values flow from lower to higher stages only; the buffer that a stage updates is read
nowhere else.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fusion_dask.errors import PlanError
from fusion_dask.graph.analyse import producers
from fusion_dask.graph.ir import Graph, Kind, StageProgram, Value
from fusion_dask.graph.stages import build_stages

__all__ = ["boundary_bytes", "cut", "cut_like", "holders", "valid_positions"]

_UNREACHABLE = float("inf")


@dataclass(frozen=True)
class _Layout:
    """Where each operator of a graph lies with respect to cut positions."""

    graph: Graph

    @cached_property
    def producer(self) -> dict[str, int]:
        return producers(self.graph)

    @cached_property
    def values(self) -> dict[str, Value]:
        return {v.name: v for o in self.graph.operators for v in o.outputs if v is not None}

    @cached_property
    def place(self) -> tuple[int, ...]:
        """For each operator the position that decides its stage."""
        operators = self.graph.operators
        movable = self._parameter_only()
        first_use: dict[int, int] = {}
        place = list(range(len(operators)))
        for position in reversed(range(len(operators))):
            if position in movable and position in first_use:
                place[position] = first_use[position]
            for name in operators[position].inputs:
                source = self.producer.get(name)
                if source is not None:
                    first_use[source] = min(place[position], first_use.get(source, len(operators)))
        return tuple(place)

    def _parameter_only(self) -> frozenset[int]:
        known = {p.name for p in self.graph.parameters}
        mutated = {buffer for buffer, _ in self.graph.buffer_updates}
        inert = {c.name for c in self.graph.constants}
        inert |= {b.name for b in self.graph.buffers if b.name not in mutated}
        found = set()
        for position, operator in enumerate(self.graph.operators):
            inputs = set(operator.inputs)
            if inputs & known and inputs <= known | inert and not operator.random:
                found.add(position)
                known.update(v.name for v in operator.outputs if v is not None)
        return frozenset(found)

    def is_free(self, name: str) -> bool:
        source = self.producer.get(name)
        return source is None or self.graph.operators[source].kind is Kind.FREE

    @cached_property
    def forbidden(self) -> frozenset[int]:
        """Positions between the readers of a buffer and what updates it."""
        spans: dict[str, list[int]] = {buffer: [] for buffer, _ in self.graph.buffer_updates}
        for position, operator in enumerate(self.graph.operators):
            for name in operator.inputs:
                if name in spans:
                    spans[name].append(self.place[position])
        for buffer, value in self.graph.buffer_updates:
            if value in self.producer:
                spans[buffer].append(self.place[self.producer[value]])
        return frozenset(
            i for span in spans.values() if span for i in range(min(span) + 1, max(span) + 1)
        )


def boundary_bytes(graph: Graph) -> tuple[int, ...]:
    """Bytes of one microbatch that cross each cut position 1 .. len(operators) - 1, forward.

    Element `i - 1` belongs to position `i`. FREE values and user inputs do not count: each stage
    has them. A value that is used several stages later counts at every position it crosses.
    """
    layout = _Layout(graph)
    count = len(graph.operators)
    change = [0] * (count + 1)
    last_use: dict[int, dict[str, int]] = {}
    for position, operator in enumerate(graph.operators):
        if operator.kind is Kind.FREE:
            continue
        for name in operator.inputs:
            if not layout.is_free(name):
                uses = last_use.setdefault(layout.producer[name], {})
                uses[name] = max(uses.get(name, 0), layout.place[position])
    for source, uses in last_use.items():
        for name, last in uses.items():
            size = layout.values[name].spec.bytes
            change[layout.place[source] + 1] += size
            change[last + 1] -= size
    totals, live = [], 0
    for position in range(count):
        live += change[position]
        if position:
            totals.append(live)
    return tuple(totals)


def valid_positions(graph: Graph) -> tuple[int, ...]:
    """Cut positions with an operator that reads a parameter on each side, and no buffer split."""
    layout = _Layout(graph)
    parametric = [
        layout.place[i] for i, o in enumerate(graph.operators) if o.kind is Kind.PARAMETRIC
    ]
    if not parametric:
        return ()
    return tuple(
        i for i in range(min(parametric) + 1, max(parametric) + 1) if i not in layout.forbidden
    )


def cut(graph: Graph, positions: Sequence[int]) -> tuple[StageProgram, ...]:
    """Cut a graph at ascending positions into `len(positions) + 1` stage programs.

    Raises:
        ValueError: The positions do not ascend strictly within the graph.
        PlanError: A position would part the readers of a buffer from what updates it.
    """
    count = len(graph.operators)
    if any(not 0 < p < count for p in positions) or any(a >= b for a, b in pairwise(positions)):
        raise ValueError(f"cut positions must ascend strictly within 1..{count - 1}: {positions}")
    layout = _Layout(graph)
    if bad := layout.forbidden.intersection(positions):
        raise PlanError(
            f"cut at operator {min(bad)} would part a buffer from what updates it; choose among "
            "valid_positions(graph)"
        )
    stages = tuple(bisect_right(positions, place) for place in layout.place)
    return build_stages(graph, stages, len(positions) + 1)


def holders(programs: Sequence[StageProgram]) -> dict[str, tuple[int, ...]]:
    """For each parameter and each updated buffer, the stages that hold it, ascending."""
    found: dict[str, tuple[int, ...]] = {}
    for program in programs:
        updated = [buffer for buffer, _ in program.buffer_updates]
        for name in [*(p.name for p in program.parameters), *updated]:
            found[name] = (*found.get(name, ()), program.index)
    return found


def cut_like(graph: Graph, owner: Mapping[str, int | tuple[int, ...]]) -> tuple[StageProgram, ...]:
    """Cut another capture of a model so that each parameter lies where it already is.

    Args:
        graph: For example the evaluation capture of a model whose training capture was cut.
        owner: For each parameter (or buffer) its stage, or all stages that hold it: what
            `holders` says of the training programs. Names that the graph lacks are ignored.

    Returns:
        As many stages as `owner` names; among the cuts that are possible the one that ships the
        fewest bytes.

    Raises:
        PlanError: The graph reads the parameters in an order for which no such cut exists.
    """
    allowed = {name: {at} if isinstance(at, int) else set(at) for name, at in owner.items()}
    stage_count = 1 + max((max(at) for at in allowed.values()), default=0)
    layout = _Layout(graph)
    choices: list[set[int]] = [set(range(stage_count)) for _ in graph.operators]
    for position, operator in enumerate(graph.operators):
        for name in operator.inputs:
            if name in allowed:
                choices[layout.place[position]] &= allowed[name]
    sizes = (0, *boundary_bytes(graph))
    positions = _cheapest(choices, sizes, layout.forbidden, stage_count)
    if positions is None:
        raise PlanError(
            "this capture of the model reads its parameters in another order than the stages hold "
            "them: evaluate with a single stage, or cut both captures at the same blocks"
        )
    return cut(graph, positions)


def _cheapest(
    choices: Sequence[set[int]],
    sizes: Sequence[int],
    forbidden: frozenset[int],
    stage_count: int,
) -> tuple[int, ...] | None:
    """Dynamic programme over operators: the positions at which the stage rises by one."""
    cost: list[float] = [
        0.0 if s == 0 and 0 in choices[0] else _UNREACHABLE for s in range(stage_count)
    ]
    rises: list[list[bool]] = []
    for position in range(1, len(choices)):
        after, rose = [], []
        for stage in range(stage_count):
            stay = cost[stage]
            rise = _UNREACHABLE
            if stage and position not in forbidden:
                rise = cost[stage - 1] + sizes[position]
            best = min(stay, rise) if stage in choices[position] else _UNREACHABLE
            after.append(best)
            rose.append(rise < stay)
        cost = after
        rises.append(rose)
    if cost[-1] == _UNREACHABLE:
        return None
    stage, found = stage_count - 1, []
    for position in range(len(choices) - 1, 0, -1):
        if rises[position - 1][stage]:
            found.append(position)
            stage -= 1
    return tuple(reversed(found))
