"""Several pipelines side by side: who belongs to which, and how the batch is split.

Workers are taken in the order of the clusters' line, so that a group is near together, and the line
is cut into groups of about equal speed, of everybody or of the better linked half; of a small pool every
way to form groups is tried. How many groups there should be is judged by one of them. Each group gets
a pipeline for a share of the batch in proportion to its speed; then microbatches move from the slowest
pipeline to one that can take them as long as the step gets shorter.

A heuristic: the best pipeline of a group is found without the replicas' synchronisation, which only
the comparison of the whole plans counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fusion_dask.planner.cost_model import device_key
from fusion_dask.planner.guesses import speeds, uplinks
from fusion_dask.planner.pipelines import Found, PipelineSearch
from fusion_dask.planner.records import Objective

__all__ = ["best_side_by_side", "side_by_side"]

#: Pools of which every grouping is tried.
SMALL: Final = 5
#: Ways to form groups that are worked out for every group.
LIKELY: Final = 2

Group = tuple[int, ...]


def best_side_by_side(
    search: PipelineSearch,
    members: Sequence[int],
    microbatches: int,
    most: int,
    effort: float,
    value: Callable[[Sequence[Found]], float],
) -> list[Found] | None:
    """The best way found to run two pipelines or more, or None where there is none.

    Args:
        search: Finds the pipeline of a group.
        members: Places in the pool of the workers that may take part.
        microbatches: Microbatches of the model in a step, over all pipelines.
        most: Most pipelines.
        effort: Table elements to spend.
        value: What is minimised, of several pipelines as one plan.
    """
    if len(members) <= SMALL:
        parts = [p for p in _set_partitions(list(members)) if 1 < len(p) <= most]
        ways = [[tuple(sorted(group)) for group in part] for part in parts]
        tried = [side_by_side(search, way, microbatches, None) for way in ways]
        return min((t for t in tried if t is not None), key=value, default=None)
    most = min(most, len(members), _room(search, members))
    # Of a group of more than twice the blocks most workers would be left over.
    least = max(2, len(members) // (2 * len(search.model.blocks)))
    samples = _samples(search, members, microbatches, _powers(least, most), effort / 2)
    if samples:
        # Between the powers of two, around the best one.
        best = len(min(samples, key=_by_value).way)
        between = [c for c in (best * 3 // 4, best * 3 // 2) if 1 < c <= most and c != best]
        samples += _samples(search, members, microbatches, between, effort / 2)
    likely = sorted(samples, key=_by_value)[:LIKELY]
    tried = [side_by_side(search, s.way, microbatches, s.found) for s in likely]
    return min((t for t in tried if t is not None), key=value, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A way to form groups, the pipeline of one of them, and what all would be worth."""

    way: list[Group]
    found: Found
    value: float


def _by_value(sample: _Sample) -> float:
    return sample.value


def _powers(least: int, most: int) -> list[int]:
    return [2**k for k in range(1, most.bit_length()) if 2**k >= least]


def _samples(
    search: PipelineSearch,
    members: Sequence[int],
    microbatches: int,
    counts: Sequence[int],
    effort: float,
) -> list[_Sample]:
    """One group stands for all of its way: they are about equally fast."""
    samples = []
    ways = _ways(search, members, counts)
    for way in ways:
        quantum = _quantum(microbatches, len(way))
        share = -(-microbatches // quantum // len(way)) * quantum
        found = search.find(way[len(way) // 2], share, effort / len(ways))
        if found is not None:
            value = _expected(search, found, len(way))
            samples.append(_Sample(way=way, found=found, value=value))
    return samples


def _expected(search: PipelineSearch, sample: Found, count: int) -> float:
    """What `count` pipelines like this one would be worth, synchronisation included."""
    model = search.cost_model(1)
    chosen = sample.best.candidates
    rate = uplinks(model)[chosen.workers[:, 0]]
    size = model.tables.gradient_bytes[chosen.edges[:-1, 0], chosen.edges[1:, 0]]
    delay = float(np.median(model.links.delay_s))
    rounds = 2 * (count - 1)
    sync_s = (rounds / count * float((size / rate).max()) + rounds * delay) / (
        model.workload.sync_every_steps
    )
    step_s = sample.best.step_s
    if sample.setting.objective is Objective.THROUGHPUT:
        return step_s + sync_s
    return count * sample.best.value * (step_s + sync_s) / step_s


def _room(search: PipelineSearch, members: Sequence[int]) -> int:
    """Pipelines for which the members' memory could be enough."""
    model = search.cost_model(1)
    return int(model.free_bytes[list(members)].sum() // model.tables.fixed_bytes[0, -1])


def _ways(
    search: PipelineSearch, members: Sequence[int], counts: Sequence[int]
) -> list[list[Group]]:
    """Groups of about equal speed along the line: of everybody, and of the better linked half."""
    uplink = uplinks(search.cost_model(1))
    line = search.clustering(members).line
    middle = float(np.median(uplink[list(line)]))
    better = tuple(w for w in line if uplink[w] >= middle)
    lines = [line, better] if len(better) < len(line) else [line]
    ways = [_segments(search, some, count) for some in lines for count in counts]
    return [way for way in ways if all(way)]


def _segments(search: PipelineSearch, line: Sequence[int], count: int) -> list[Group]:
    speed = speeds(search.cost_model(1))[list(line)]
    middle = (np.cumsum(speed) - speed / 2) / speed.sum()
    owner = np.minimum((middle * count).astype(int), count - 1)
    return [tuple(w for w, o in zip(line, owner, strict=True) if o == g) for g in range(count)]


def side_by_side(
    search: PipelineSearch, groups: Sequence[Group], microbatches: int, like: Found | None
) -> list[Found] | None:
    """A pipeline for each group, with its share of the batch; None where a group cannot hold one.

    Args:
        search: Finds the pipeline of a group.
        groups: The workers of each pipeline.
        microbatches: Microbatches of the model in a step, over all pipelines.
        like: What the pipelines should be like; None searches each group for itself.
    """
    speed = speeds(search.cost_model(1))
    together = [float(speed[list(g)].sum()) for g in groups]
    quantum = _quantum(microbatches, len(groups))
    shares = _split(microbatches // quantum, together)
    if min(shares) == 0:
        return None
    known: dict[tuple[object, ...], Found | None] = {}
    found: list[Found] = []
    for group, share in zip(groups, shares, strict=True):
        key = (share, *_signature(search, group))
        if key not in known:
            many = share * quantum
            known[key] = (
                search.find(group, many) if like is None else search.find_like(group, many, like)
            )
        one = known[key]
        if one is None:
            return None
        found.append(_on(one, group))
    return _balance(search, found)


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


def _on(found: Found, group: Group) -> Found:
    """The same pipeline on a group with the same signature."""
    place = dict(zip(found.members, group, strict=True))
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
