"""Several pipelines side by side: who belongs to which, and how the batch is split.

Workers are taken in the order of the clusters' line, so that a group is near together, and the line
is cut into groups of about equal speed; of a small pool every way to form groups is tried. Each group
gets its best pipeline for a share of the batch in proportion to its speed; then microbatches move from
the slowest pipeline to one that can take them as long as the step gets shorter.

A heuristic: the best pipeline of a group is found without the replicas' synchronisation, which only
the comparison of the whole plans counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fusion_dask.planner.cost_model import device_key
from fusion_dask.planner.pipelines import Found, PipelineSearch

__all__ = ["groupings", "side_by_side"]

#: Pools of which every grouping is tried.
SMALL: Final = 5

Group = tuple[int, ...]


def groupings(search: PipelineSearch, members: Sequence[int], most: int) -> Iterator[list[Group]]:
    """Ways to part workers into two groups or more."""
    if len(members) <= SMALL:
        for parts in _set_partitions(list(members)):
            if 1 < len(parts) <= most:
                yield [tuple(part) for part in parts]
        return
    line = search.clustering(members).line
    model = search.cost_model(1)
    speed = 1.0 / (model.forward[:, -1] + model.backward[:, -1])[list(line)]
    middle = (np.cumsum(speed) - speed / 2) / speed.sum()
    room = model.free_bytes[list(line)]
    need = float(model.tables.fixed_bytes[0, -1])
    for count in _counts(min(most, int(room.sum() // need), len(line))):
        owner = np.minimum((middle * count).astype(int), count - 1)
        groups = [
            tuple(w for w, o in zip(line, owner, strict=True) if o == g) for g in range(count)
        ]
        if all(groups):
            yield groups


def side_by_side(
    search: PipelineSearch, groups: Sequence[Group], microbatches: int, effort: float
) -> list[Found] | None:
    """A pipeline for each group, with its share of the batch; None where a group cannot hold one."""
    model = search.cost_model(1)
    speed = 1.0 / (model.forward[:, -1] + model.backward[:, -1])
    speeds = [float(speed[list(g)].sum()) for g in groups]
    quantum = _quantum(microbatches, len(groups))
    shares = _split(microbatches // quantum, speeds)
    if min(shares) == 0:
        return None
    known: dict[tuple[object, ...], Found] = {}
    found: list[Found] = []
    for group, share in zip(groups, shares, strict=True):
        key = (share, *_signature(search, group))
        if key not in known:
            one = search.find(group, share * quantum, effort / len(groups))
            if one is None:
                return None
            known[key] = one
        found.append(_on(known[key], group, search, share * quantum))
    return _balance(search, found)


def _counts(most: int) -> list[int]:
    """2, 3, 4, 6, 8, 12, ... up to the most."""
    counts = [c for k in range(1, 12) for c in (2**k, 3 * 2 ** (k - 1)) if c <= most]
    return sorted({*counts, most} - {0, 1})


def _quantum(microbatches: int, groups: int) -> int:
    """Shares are multiples of this, so that microbatches can be merged."""
    for quantum in (8, 4, 2):
        if microbatches % quantum == 0 and microbatches // quantum >= 4 * groups:
            return quantum
    return 1


def _split(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares in proportion to the weights (largest remainder)."""
    exact = [total * w / sum(weights) for w in weights]
    shares = [int(e) for e in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _signature(search: PipelineSearch, group: Group) -> tuple[object, ...]:
    """Equal for groups that the cost model cannot tell apart, in their order."""
    which = np.ix_(group, group)
    return (
        tuple(device_key(search.pool[w]) for w in group),
        search.links.delay_s[which].tobytes(),
        search.links.bytes_per_s[which].tobytes(),
    )


def _on(found: Found, group: Group, search: PipelineSearch, microbatches: int) -> Found:
    """The same pipeline on a group with the same signature."""
    source = found.members
    place = dict(zip(source, group, strict=True))
    workers = np.vectorize(place.__getitem__)(found.best.candidates.workers)
    candidates = replace(found.best.candidates, workers=workers)
    return replace(found, best=replace(found.best, candidates=candidates), members=group)


def _balance(search: PipelineSearch, found: list[Found]) -> list[Found]:
    """Move microbatches from the slowest pipeline to the one that is then the fastest."""
    while True:
        slow = max(range(len(found)), key=lambda i: found[i].best.step_s)
        less = search.refit(found[slow], found[slow].setting.microbatches - 1)
        if less is None:
            return found
        moved = found[slow].merge
        takers = {
            i: search.refit(f, f.setting.microbatches + moved // f.merge)
            for i, f in enumerate(found)
            if i != slow and moved % f.merge == 0
        }
        able = {i: taker for i, taker in takers.items() if taker is not None}
        if not able:
            return found
        i = min(able, key=lambda j: (able[j].best.step_s, j))
        if able[i].best.step_s >= found[slow].best.step_s * (1 - 1e-9):
            return found
        found[slow], found[i] = less, able[i]


def _set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to part some items into groups."""
    if not items:
        yield []
        return
    head, *rest = items
    for parts in _set_partitions(rest):
        yield [[head], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [head, *part], *parts[i + 1 :]]
