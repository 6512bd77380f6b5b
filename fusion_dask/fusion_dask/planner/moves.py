"""What has to move when a plan changes: the state of blocks, to workers that do not hold it yet.

A worker fetches parameters and optimizer state from a worker that holds them, over the fastest of
their links, or where nobody is left from the store. Fetches to one worker share its time, and so do
fetches from one worker; the store serves all at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusion_dask.planner.cost_model import CostModel
from fusion_dask.planner.profile import BROKER, STORE
from fusion_dask.planner.records import PlacedReplica, PoolWorker

__all__ = ["Move", "moves_between", "moving_s"]

#: Bytes per second from the store where no link was measured: a gigabit network.
UNKNOWN_STORE_BYTES_PER_S = 117e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """State that a worker has to fetch.

    Attributes:
        worker: Who fetches.
        source: The worker that has it, or None for the store.
        start: First block.
        stop: One past the last block.
        size_bytes: Parameters and optimizer state.
        seconds: Of this fetch alone.
    """

    worker: str
    source: str | None
    start: int
    stop: int
    size_bytes: int
    seconds: float


def moves_between(
    model: CostModel, before: Sequence[PlacedReplica], after: Sequence[PlacedReplica]
) -> tuple[Move, ...]:
    """What each worker has to fetch, in the order of the new plan.

    Args:
        model: The model on the pool as it is now.
        before: The plan that ran; its workers need not be in the pool any more.
        after: The new one.
    """
    place = {w.name: i for i, w in enumerate(model.pool)}
    holders: dict[int, list[str]] = {}
    for stage in (s for r in before for s in r.stages if s.worker in place):
        for block in range(stage.start, stage.stop):
            holders.setdefault(block, []).append(stage.worker)
    moves = []
    for stage in (s for r in after for s in r.stages):
        sources = {
            block: _source(model, place, holders.get(block, ()), stage.worker)
            for block in range(stage.start, stage.stop)
        }
        for start, stop in _runs(sources):
            source = sources[start]
            if source == stage.worker:
                continue
            size = float(model.tables.state_bytes[start, stop])
            moves.append(
                Move(
                    worker=stage.worker,
                    source=source,
                    start=start,
                    stop=stop,
                    size_bytes=int(size),
                    seconds=_seconds(model, place, source, stage.worker, size),
                )
            )
    return tuple(moves)


def moving_s(moves: Sequence[Move]) -> float:
    """Until the last worker has all that it needs."""
    busy: dict[tuple[str, str], float] = {}
    for move in moves:
        ends = [("to", move.worker)]
        if move.source is not None:
            ends.append(("from", move.source))
        for end in ends:
            busy[end] = busy.get(end, 0.0) + move.seconds
    return max(busy.values(), default=0.0)


def _source(
    model: CostModel, place: Mapping[str, int], holders: Sequence[str], worker: str
) -> str | None:
    """The worker itself, or the one that it hears best, or the store."""
    if worker in holders:
        return worker
    rate = model.links.bytes_per_s
    return max(holders, key=lambda h: float(rate[place[h], place[worker]]), default=None)


def _runs(sources: Mapping[int, str | None]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring blocks with one source."""
    start = min(sources)
    for block in range(start, max(sources) + 1):
        if block + 1 not in sources or sources[block + 1] != sources[block]:
            yield start, block + 1
            start = block + 1


def _seconds(
    model: CostModel, place: Mapping[str, int], source: str | None, worker: str, size: float
) -> float:
    if source is not None:
        return model.links.between(place[source], place[worker]).seconds(size)
    return size / _from_store(model.pool[place[worker]])


def _from_store(worker: PoolWorker) -> float:
    links = worker.profile.links
    for name in (STORE, BROKER):
        if name in links:
            return links[name].receive_bytes_per_s
    return UNKNOWN_STORE_BYTES_PER_S
