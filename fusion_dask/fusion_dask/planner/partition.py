"""Where to cut a graph: balanced stages first, then as few boundary bytes as the balance allows.

The bottleneck of a synchronous pipeline is its slowest stage (Narayanan et al., arXiv 1806.03377). A
dynamic programme over the useful cut positions finds the smallest possible bottleneck; a second one
finds, among the cuts whose bottleneck is at most `SLACK` times that, those that carry the fewest
bytes. Of all positions between two consecutive parametric operators only the one with the fewest
boundary bytes is useful.

Pure: numbers in, positions out, the same for the same numbers.
"""

import itertools
import math
from collections.abc import Collection, Sequence

from fusion_dask.errors import PlanError
from fusion_dask.graph.ir import Graph

__all__ = ["SLACK", "candidates", "operator_seconds", "partition"]

#: Bottleneck that is accepted for fewer bytes, over the best one. Measured: 10 % cut one boundary of
#: a small decoder from 967 KB to 262 KB.
SLACK = 1.1


def operator_seconds(graph: Graph, flops_per_s: float = 1.0) -> tuple[float, ...]:
    """Forward and backward seconds of each operator for one microbatch, from its FLOPs."""
    return tuple(
        (o.cost.flops_forward + o.cost.flops_backward) / flops_per_s for o in graph.operators
    )


def candidates(graph: Graph, bytes_at: Sequence[int], allowed: Collection[int]) -> tuple[int, ...]:
    """The useful cut positions, ascending.

    Args:
        graph: The graph.
        bytes_at: Boundary bytes of the cut before operator i, for i from 1.
        allowed: The positions at which the graph can be cut at all.
    """
    parameters = {p.name for p in graph.parameters}
    parametric = [i for i, o in enumerate(graph.operators) if parameters & set(o.inputs)]
    best = []
    for left, right in itertools.pairwise(parametric):
        between = [i for i in range(left + 1, right + 1) if i in allowed]
        if between:
            # The last of equals: what follows a parametric operator belongs to it.
            best.append(min(between, key=lambda i: (bytes_at[i - 1], -i)))
    return tuple(best)


def partition(
    seconds: Sequence[float],
    positions: Sequence[int],
    bytes_at: Sequence[int],
    speeds: Sequence[float],
) -> tuple[int, ...]:
    """Cut positions of `len(speeds)` stages.

    Args:
        seconds: Seconds of each operator at speed 1.
        positions: The useful cut positions, ascending.
        bytes_at: Boundary bytes of the cut before operator i, for i from 1.
        speeds: Relative speed of the worker of each stage, in pipeline order.

    Returns:
        One position fewer than stages, ascending.

    Raises:
        PlanError: There are more stages than the graph can be cut into.
    """
    stages = len(speeds)
    if stages - 1 > len(positions):
        raise PlanError(
            f"{stages} stages were asked for, but the model has only {len(positions) + 1} operators "
            f"with parameters; use at most {len(positions) + 1} stages"
        )
    edges = (0, *positions, len(seconds))
    prefix = list(itertools.accumulate(seconds, initial=0.0))
    cost = [[prefix[b] - prefix[a] for b in edges] for a in edges]
    bottleneck = _search(len(edges), speeds, cost, [0.0] * len(edges), math.inf)[0]
    carried = [0.0, *(float(bytes_at[p - 1]) for p in positions), 0.0]
    chosen = _search(len(edges), speeds, cost, carried, bottleneck * SLACK)[1]
    return tuple(edges[i] for i in chosen)


def _search(
    count: int,
    speeds: Sequence[float],
    cost: Sequence[Sequence[float]],
    carried: Sequence[float],
    limit: float,
) -> tuple[float, list[int]]:
    """Best cuts under a limit on every stage's seconds.

    Minimises (bytes carried, bottleneck) in that order; with nothing carried, the bottleneck.
    """
    worst = (math.inf, math.inf)
    best = [(0.0, 0.0) if j == 0 else worst for j in range(count)]
    back: list[list[int]] = []
    for stage, speed in enumerate(speeds):
        after = [worst] * count
        origin = [0] * count
        # Every stage takes at least one edge, and leaves one for each stage that follows.
        for j in range(stage + 1, count - (len(speeds) - stage - 1)):
            for i in range(stage, j):
                here = cost[i][j] / speed
                if best[i] == worst or here > limit * (1 + 1e-12):
                    continue
                value = (best[i][0] + carried[j], max(best[i][1], here))
                if value < after[j]:
                    after[j], origin[j] = value, i
        best = after
        back.append(origin)
    chosen, j = [], count - 1
    for origin in reversed(back):
        j = origin[j]
        chosen.append(j)
    return best[count - 1][1], sorted(chosen)[1:]
