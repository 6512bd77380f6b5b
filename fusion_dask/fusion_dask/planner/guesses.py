"""First guesses: sets of workers that could run a pipeline well, in orders that are worth a try.

For a target period T every worker has a capacity: the share of the model that it computes in T and
that its memory holds. The workers with the largest capacities are taken until they cover the model.
That is done for several targets, within several clusters, and among the workers whose uplink reaches
several thresholds, since one slow uplink slows a whole pipeline. Each set is put in the order of the
clusters' line, both ways, and in the order of falling memory, since early stages hold more
microbatches.

Of short pipelines there are few orders: `short_orders` gives all of them, where they can be tried.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.clusters import Clustering
from fusion_dask.planner.cost_model import CostModel
from fusion_dask.planner.evaluate import Setting

__all__ = ["first_orders", "short_orders", "speeds", "uplinks"]

Floats = NDArray[np.float64]
Order = tuple[int, ...]

#: Clusters that guesses are taken from, besides everybody.
GROUPS: Final = 4
#: Target periods.
TARGETS: Final = 10
#: Shares of the workers that a threshold on the uplink leaves out.
THRESHOLDS: Final = (0.0, 0.3, 0.6, 0.85)
#: Capacity that a set has to have over what the model needs: cuts are not exact.
SPARE: Final = 1.1
#: Table elements of all orders of one length, one pass; about a second.
SHORT: Final = 3e7


def speeds(model: CostModel) -> Floats:
    """Microbatches per second of every worker alone."""
    found: Floats = 1.0 / (model.forward[:, -1] + model.backward[:, -1])
    return found


def uplinks(model: CostModel) -> Floats:
    """Bytes per second that every worker sends to the one that it reaches best."""
    rate = model.links.bytes_per_s
    best: Floats = np.where(np.isfinite(rate), rate, 0.0).max(axis=1)
    return best


def first_orders(
    model: CostModel, clustering: Clustering, setting: Setting, sizes: Sequence[int]
) -> dict[int, list[Order]]:
    """Orders to try, by their length, the likeliest first.

    Args:
        model: The model on the pool.
        clustering: Of the workers that may take part.
        setting: What the candidates have in common.
        sizes: Lengths that are wanted.
    """
    place = {worker: i for i, worker in enumerate(clustering.line)}
    found: dict[int, dict[Order, None]] = {size: {} for size in sizes}
    for chosen in _sets(model, clustering, setting, sizes):
        line = tuple(sorted(chosen, key=place.__getitem__))
        roomy = tuple(sorted(line, key=lambda w: (-model.free_bytes[w], place[w])))
        for order in (line, line[::-1], roomy):
            found[len(chosen)][order] = None
    return {size: list(orders) for size, orders in found.items() if orders}


def short_orders(
    model: CostModel, members: Sequence[int], sizes: Sequence[int]
) -> dict[int, list[Order]]:
    """Every order of the members, for the lengths for which that is little work."""
    ranges = (model.tables.count + 1) ** 2
    few = [s for s in sizes if math.perm(len(members), s) * s * ranges <= SHORT]
    return {size: list(permutations(members, size)) for size in few}


def _sets(
    model: CostModel, clustering: Clustering, setting: Setting, sizes: Sequence[int]
) -> Iterator[list[int]]:
    """Sets of workers, in the order of falling capacity."""
    wanted = set(sizes)
    if not wanted:
        return
    rate = uplinks(model)
    line = np.array(clustering.line)
    limits = [float(np.quantile(rate[line], share)) for share in THRESHOLDS]
    large = [g for g in clustering.groups if len(g) >= min(wanted)]
    for group in [clustering.line, *large[:GROUPS]]:
        for limit in dict.fromkeys(limits):
            able = np.array([w for w in group if rate[w] >= limit], dtype=np.intp)
            for target_s in _targets(model, able):
                share = _capacity(model, able, target_s, setting)
                ranked = able[np.argsort(-share, kind="stable")]
                covered = np.cumsum(np.sort(share)[::-1])
                enough = int(np.searchsorted(covered, SPARE)) + 1
                for size in sorted({enough, *_steps(sizes)} & wanted):
                    if size <= len(ranked):
                        yield [int(w) for w in ranked[:size]]


def _steps(sizes: Sequence[int]) -> list[int]:
    """All small sizes, then steps of a quarter, and the largest."""
    kept: list[int] = []
    for size in sizes:
        if size <= 8 or not kept or size >= kept[-1] * 1.25 or size == sizes[-1]:
            kept.append(size)
    return kept


def _targets(model: CostModel, able: NDArray[np.intp]) -> Floats:
    """Periods from everybody together to the fastest one alone."""
    if not len(able):
        return np.zeros(0)
    speed = speeds(model)[able]
    # The slowest alone: where memory binds, more than one worker is needed even then.
    grid: Floats = np.geomspace(1 / speed.sum(), 1 / speed.min(), TARGETS)
    return grid


def _capacity(
    model: CostModel, able: NDArray[np.intp], target_s: float, setting: Setting
) -> Floats:
    """Share of the model that each worker could take."""
    tables = model.tables
    speed = speeds(model)[able]
    depth = 1 / (target_s * float(np.median(speed)))
    held = min(setting.microbatches, max(1.0, depth / 2))
    kept = 0.0 if setting.recomputes else held * tables.saved_bytes[0, -1]
    room = model.free_bytes[able] / (tables.fixed_bytes[0, -1] + kept)
    share: Floats = np.minimum(np.minimum(target_s * speed, room), 1.0)
    return share
