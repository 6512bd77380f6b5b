"""Good orders of workers for pools that are too large to try everything.

Steepest descent from first guesses (`guesses.py`) over neighbouring orders: swap two, move one, turn a
piece around, take an unused worker instead of one, add one, leave one out. Each order is cut by
`chain.cuts_for` and its candidates are evaluated exactly; the cuts of the best one are then shifted by
single blocks, which repairs what the programme's period and fill do not see.

The effort is a number of table elements, not seconds: the same input gives the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from fusion_dask.planner.chain import BISECTIONS, LIMITS, cuts_for
from fusion_dask.planner.cost_model import Candidates, CostModel, device_key
from fusion_dask.planner.evaluate import ACTIONS, Best, Setting, best

__all__ = ["Effort", "descend", "neighbours", "shift_cuts", "try_orders"]

Order = tuple[int, ...]

#: Limits during the search; the last evaluation tries all of `chain.LIMITS`.
FEW_LIMITS: Final = (1.15,)
#: Passes over the tables of an order, with the few limits.
PASSES: Final = 4 + BISECTIONS
#: Blocks of a model for which trying all of `chain.LIMITS` costs nothing.
SMALL: Final = 32
#: Orders of one length that are tried at once at most.
NEIGHBOURS: Final = 600
#: Share of what is left that one round may spend on orders of one length.
ROUND: Final = 0.3


@dataclass(slots=True, kw_only=True)
class Effort:
    """Table elements that may still be computed; about 10 ns each."""

    elements: float

    def pay(self, model: CostModel, orders: Sequence[Order]) -> list[Order]:
        """As many of these orders as can be paid for, evenly."""
        if not orders:
            return []
        each = len(orders[0]) * (model.tables.count + 1) ** 2 * PASSES
        many = min(len(orders), NEIGHBOURS, int(self.elements / each))
        self.elements -= many * each
        step = len(orders) / max(1, many)
        return [orders[int(i * step)] for i in range(many)]

    def part(self, share: float) -> "Effort":
        """Take a share of what is left for something."""
        taken = self.elements * share
        self.elements -= taken
        return Effort(elements=taken)


def try_orders(
    model: CostModel,
    orders: Sequence[Order],
    setting: Setting,
    incumbent: Best | None,
    limits: Sequence[float] | None = None,
) -> Best | None:
    """The best pipeline along any of these orders, which are equally long, or the incumbent."""
    if not orders:
        return incumbent
    if limits is None:
        limits = LIMITS if model.tables.count <= SMALL else FEW_LIMITS
    candidates = cuts_for(model, np.array(orders, dtype=np.intp).T, setting, limits)
    return best(model, candidates, setting, incumbent, exact=False)


def shift_cuts(model: CostModel, start: Best, setting: Setting) -> Best:
    """The best pipeline that shifting one cut, or two, by a block leads to, step by step."""
    count = start.candidates.edges.shape[0] - 2
    if count < 1:
        return start
    singles = [{i: d} for i in range(count) for d in (-1, 1)]
    pairs = [
        {i: d, j: e} for i, j in combinations(range(count), 2) for d in (-1, 1) for e in (-1, 1)
    ]
    shifts = np.zeros((count + 2, len(singles) + len(pairs)), dtype=np.intp)
    for column, shift in enumerate([*singles, *pairs]):
        for i, d in shift.items():
            shifts[i + 1, column] = d
    shifts = shifts[:, : NEIGHBOURS + len(singles)]
    while True:
        edges = start.candidates.edges + shifts
        edges = edges[:, (np.diff(edges, axis=0) > 0).all(axis=0)]
        workers = np.repeat(start.candidates.workers, edges.shape[1], axis=1)
        shifted = Candidates(
            workers=workers, edges=edges, recomputes=np.zeros(workers.shape, dtype=np.bool_)
        )
        found = best(model, shifted, setting, start, exact=False)
        if found is None or found is start:
            return start
        start = found


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
    # Where a schedule takes long to evaluate, the cuts are shifted only once the order is found.
    cheap = setting.microbatches * len(start.candidates.workers) <= ACTIONS // 64
    if cheap:
        start = shift_cuts(model, start, setting)
    while True:
        order = tuple(int(w) for w in start.candidates.workers[:, 0])
        order = order[: len(order) // setting.chunks]
        found: Best | None = start
        for orders in neighbours(model, order, members, setting, resize=resize):
            part = effort.part(ROUND)
            found = try_orders(model, part.pay(model, orders), setting, found)
            effort.elements += part.elements
        assert found is not None
        if found is not start and cheap:
            found = shift_cuts(model, found, setting)
        if found is start or effort.elements < 1:
            return found
        start = found


def neighbours(
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
