"""Every order of workers and every cut: exact, for small pools and models.

Workers that may be exchanged without any difference (equal devices, equal links to everybody) are
twins: of the orders that differ by twins only, the one that takes them in the order of the pool is
tried. `count` says how many candidates there are, so that the caller can decide.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.cost_model import Candidates, CostModel, device_key
from fusion_dask.planner.links import LinkTable
from fusion_dask.planner.records import PoolWorker

__all__ = ["count", "every", "twins"]

Indices = NDArray[np.intp]

#: Candidates in one batch.
BATCH = 40_000


def twins(pool: Sequence[PoolWorker], links: LinkTable) -> tuple[int, ...]:
    """For each worker the first one that it may be exchanged with, perhaps itself."""
    found: list[int] = []
    heads: dict[tuple[object, ...], list[int]] = {}
    for i, worker in enumerate(pool):
        known = heads.setdefault(device_key(worker), [])
        head = next((h for h in known if _exchangeable(h, i, links)), i)
        if head == i:
            known.append(i)
        found.append(head)
    return tuple(found)


def count(blocks: int, classes: Sequence[int], chunks: int, sizes: Sequence[int]) -> int:
    """Number of candidates for these numbers of workers in the pipeline."""
    ways = [1.0]  # exponential generating function of the sequences
    for many in Counter(classes).values():
        grown = [0.0] * (len(ways) + many)
        for i, way in enumerate(ways):
            for k in range(many + 1):
                grown[i + k] += way / math.factorial(k)
        ways = grown
    return sum(
        round(ways[s] * math.factorial(s)) * math.comb(blocks - 1, s * chunks - 1) for s in sizes
    )


def every(model: CostModel, chunks: int, size: int, classes: Sequence[int]) -> Iterator[Candidates]:
    """All candidates of `size` workers, in batches; none recomputes."""
    stages, blocks = size * chunks, model.tables.count
    cuts = list(combinations(range(1, blocks), stages - 1))
    if not cuts:
        return
    edges = np.array([(0, *c, blocks) for c in cuts], dtype=np.intp).T
    orders = np.array(list(_orders(classes, size)), dtype=np.intp).T
    at_once = max(1, BATCH // edges.shape[1])
    for start in range(0, orders.shape[1], at_once):
        some = orders[:, start : start + at_once]
        workers = np.tile(np.repeat(some, edges.shape[1], axis=1), (chunks, 1))
        yield Candidates(
            workers=workers,
            edges=np.tile(edges, (1, some.shape[1])),
            recomputes=np.zeros(workers.shape, dtype=np.bool_),
        )


def _orders(classes: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Orders of `size` workers, each class in the order of the pool."""
    members = {head: [i for i, c in enumerate(classes) if c == head] for head in sorted({*classes})}
    used = dict.fromkeys(members, 0)
    order: list[int] = []

    def extend() -> Iterator[tuple[int, ...]]:
        if len(order) == size:
            yield tuple(order)
            return
        for head, workers in members.items():
            if used[head] < len(workers):
                order.append(workers[used[head]])
                used[head] += 1
                yield from extend()
                used[head] -= 1
                order.pop()

    return extend()


def _exchangeable(a: int, b: int, links: LinkTable) -> bool:
    swapped = np.arange(len(links.delay_s))
    swapped[[a, b]] = b, a
    return all(
        np.array_equal(table, table[np.ix_(swapped, swapped)])
        for table in (links.delay_s, links.bytes_per_s)
    )
