"""Good orders of workers for pools that are too large to try everything.

First guesses: for each cluster the fastest (and the roomiest) workers in it, in the order of the
line, in both directions, and inside them by falling memory, since early stages hold more microbatches.
Then steepest descent over neighbouring orders: swap two, move one, turn a piece around, take an
unused worker instead of one, add one, leave one out. Each order is cut by `chain.cuts_for` and its
candidates are evaluated exactly.

The effort is a number of table elements, not seconds: the same input gives the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from fusion_dask.planner.chain import cuts_for
from fusion_dask.planner.clusters import Clustering
from fusion_dask.planner.cost_model import CostModel, device_key
from fusion_dask.planner.evaluate import Best, Setting, best

__all__ = ["Effort", "descend", "first_orders", "try_orders"]

Order = tuple[int, ...]

#: Limits during the search; the last evaluation tries all of `chain.LIMITS`.
FEW_LIMITS: Final = (1.0, 1.15)
#: Neighbours of one order that are tried in a round at most.
NEIGHBOURS: Final = 600


@dataclass(slots=True, kw_only=True)
class Effort:
    """Table elements that may still be computed; about 10 ns each."""

    elements: float

    def pay(self, model: CostModel, orders: Sequence[Order]) -> int:
        """How many of these orders can be paid for."""
        each = sum(map(len, orders)) / max(1, len(orders)) * (model.tables.count + 1) ** 2
        many = min(len(orders), int(self.elements / max(1.0, each)))
        self.elements -= many * each
        return many


def first_orders(
    model: CostModel, clustering: Clustering, members: Sequence[int], size: int
) -> list[Order]:
    """First guesses for pipelines of `size` workers."""
    place = {worker: i for i, worker in enumerate(clustering.line)}
    speed = 1.0 / (model.forward[:, -1] + model.backward[:, -1])
    found: dict[Order, None] = {}
    for group in reversed(clustering.groups):
        if len(group) < size:
            continue
        for worth in (speed, model.free_bytes, speed * model.free_bytes):
            places = np.array([place[w] for w in group])
            ranked = np.lexsort((places, -worth[list(group)]))
            chosen = [group[i] for i in ranked[:size]]
            line = tuple(sorted(chosen, key=place.__getitem__))
            found[line] = None
            found[line[::-1]] = None
            found[tuple(sorted(chosen, key=lambda w: (-model.free_bytes[w], place[w])))] = None
    if size == 1:
        found |= dict.fromkeys((m,) for m in members)
    return list(found)


def try_orders(
    model: CostModel,
    orders: Sequence[Order],
    setting: Setting,
    incumbent: Best | None,
    limits: Sequence[float] = FEW_LIMITS,
) -> Best | None:
    """The best pipeline along any of these orders, which are equally long, or the incumbent."""
    if not orders:
        return incumbent
    candidates = cuts_for(model, np.array(orders, dtype=np.intp).T, setting, limits)
    return best(model, candidates, setting, incumbent)


def descend(
    model: CostModel,
    start: Best,
    setting: Setting,
    members: Sequence[int],
    effort: Effort,
    *,
    resize: bool,
) -> Best:
    """Better and better pipelines, until no neighbour is better or the effort is spent.

    Args:
        model: The model on the pool.
        start: Where to begin.
        setting: What candidates have in common.
        members: Workers that may take part.
        effort: What may be spent.
        resize: Workers may be added and left out.
    """
    while True:
        order = tuple(int(w) for w in start.candidates.workers[:, 0])
        order = order[: len(order) // setting.chunks]
        found: Best | None = start
        for orders in _neighbourhood(model, order, members, setting, resize=resize):
            orders = _thin(orders)
            found = try_orders(model, orders[: effort.pay(model, orders)], setting, found)
        assert found is not None
        if found is start or effort.elements <= 0:
            return found
        start = found


def _thin(orders: list[Order]) -> list[Order]:
    """At most `NEIGHBOURS` of them, evenly."""
    if len(orders) <= NEIGHBOURS:
        return orders
    step = len(orders) / NEIGHBOURS
    return [orders[int(i * step)] for i in range(NEIGHBOURS)]


def _neighbourhood(
    model: CostModel, order: Order, members: Sequence[int], setting: Setting, *, resize: bool
) -> Iterator[list[Order]]:
    """Neighbouring orders, by length."""
    size = len(order)
    spare = _spares(model, order, members)
    pairs = list(combinations(range(size), 2))
    same = [_swapped(order, i, j) for i, j in pairs]
    same += [(*order[:i], u, *order[i + 1 :]) for u in spare for i in range(size)]
    same += [_moved(order, i, j) for i in range(size) for j in range(size) if abs(i - j) > 1]
    same += [(*order[:i], *order[i : j + 1][::-1], *order[j + 1 :]) for i, j in pairs if j - i > 1]
    yield list(dict.fromkeys(same))
    if not resize:
        return
    if size > 1:
        yield [(*order[:i], *order[i + 1 :]) for i in range(size)]
    if (size + 1) * setting.chunks <= model.tables.count:
        yield [(*order[:i], u, *order[i:]) for u in spare for i in range(size + 1)]


def _spares(model: CostModel, order: Order, members: Sequence[int]) -> list[int]:
    """Unused workers; of equal devices the two with the best links to those in the order."""
    used = list(order)
    rate = model.links.bytes_per_s[:, used].max(axis=1)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for worker in sorted(set(members) - set(order), key=lambda w: (-rate[w], w)):
        kinds.setdefault(device_key(model.pool[worker]), []).append(worker)
    many = 2 if len(members) > 24 else len(members)
    return sorted(w for kind in kinds.values() for w in kind[:many])


def _swapped(order: Order, i: int, j: int) -> Order:
    changed = list(order)
    changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)


def _moved(order: Order, i: int, j: int) -> Order:
    changed = list(order)
    changed.insert(j, changed.pop(i))
    return tuple(changed)
