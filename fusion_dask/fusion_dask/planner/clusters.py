"""Who is near whom: workers grouped by how long a boundary tensor takes between them.

The distance of two workers is the time of a typical boundary tensor in the slower direction. Single
linkage (Kruskal over the minimum spanning tree) gives nested clusters: two workers are in one cluster
if a chain of short hops joins them, which is what a pipeline needs of its neighbours. The order in
which clusters grow together is a line on which every cluster lies in one piece, so that a pipeline
along it crosses each slow link once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.links import LinkTable

__all__ = ["Clustering", "cluster"]

Floats = NDArray[np.float64]

#: A step in the hops' lengths that counts as a border between clusters.
GAP = 1.5


class Clustering:
    """Nested clusters of workers.

    Attributes:
        line: All workers; every cluster is contiguous in it.
        groups: Clusters of all levels with at least two workers, smallest hops first; the last one is
            everybody.
    """

    def __init__(self, line: Sequence[int], groups: Sequence[tuple[int, ...]]) -> None:
        self.line = tuple(line)
        self.groups = tuple(groups)


def cluster(members: Sequence[int], links: LinkTable, size_bytes: float) -> Clustering:
    """Cluster some workers of a pool.

    Args:
        members: Places in the pool.
        links: Those of the pool.
        size_bytes: Bytes of a typical boundary tensor.
    """
    which = np.ix_(members, members)
    one_way = links.delay_s[which] + size_bytes / links.bytes_per_s[which]
    distance = np.maximum(one_way, one_way.T)
    chains = {i: [i] for i in range(len(members))}
    home = list(range(len(members)))
    groups: list[tuple[int, ...]] = []
    reach = 0.0
    for length, a, b in _spanning_tree(distance):
        if length > reach * GAP:
            groups += [tuple(c) for c in chains.values() if len(c) > 1 and tuple(c) not in groups]
        reach = length
        left, right = chains.pop(home[a]), chains.pop(home[b])
        joined = _join(left, right, distance)
        chains[joined[0]] = joined
        for i in joined:
            home[i] = joined[0]
    line = next(iter(chains.values()))
    named = [tuple(members[i] for i in group) for group in [*groups, tuple(line)]]
    return Clustering([members[i] for i in line], named)


def _spanning_tree(distance: Floats) -> list[tuple[float, int, int]]:
    """Edges of a minimum spanning tree, shortest first (Prim)."""
    count = len(distance)
    best = distance[0].copy()
    parent = np.zeros(count, dtype=np.intp)
    outside = np.ones(count, dtype=np.bool_)
    outside[0] = False
    edges = []
    for _ in range(count - 1):
        new = int(np.where(outside, best, np.inf).argmin())
        edges.append((float(best[new]), int(parent[new]), new))
        outside[new] = False
        closer = outside & (distance[new] < best)
        best[closer] = distance[new][closer]
        parent[closer] = new
    return sorted(edges)


def _join(left: list[int], right: list[int], distance: Floats) -> list[int]:
    """Two chains end to end, by the ends that are nearest."""
    ways = [
        (float(distance[left[-1], right[0]]), left + right),
        (float(distance[left[-1], right[-1]]), left + right[::-1]),
        (float(distance[left[0], right[0]]), left[::-1] + right),
        (float(distance[left[0], right[-1]]), right + left),
    ]
    return min(ways, key=lambda way: way[0])[1]
