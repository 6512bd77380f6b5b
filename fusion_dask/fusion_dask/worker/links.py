"""The links of a worker, measured: to the broker, the store and some peers.

Small echoes give the delay, half of the shortest round trip; larger ones the rate each way, sized so that
one takes a fraction of a second on whatever line this is. The emulated link of this worker is in what is
measured, since it is in what stages will see.

Covers: measuring, on the worker's event loop. Not covered: when (`probing.py`).

Invariant: somebody who does not answer, or answers badly, is left out, and costs `LINK_TIMEOUT_S` at
most; all links together cost `LINKS_S`.
"""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from distributed import Worker
from distributed.protocol.serialize import to_serialize

from fusion_dask.planner.profile import BROKER, STORE, LinkProfile
from fusion_dask.worker.link import ShapedLink
from fusion_storage.store import open_store

__all__ = ["measure_links"]

PEERS: Final = 4
LINK_TIMEOUT_S: Final = 3.0
LINKS_S: Final = 10.0
ECHOES: Final = 8
SMALL_BYTES: Final = 32
FIRST_BYTES: Final = 64 * 1024
LARGEST_BYTES: Final = 8 * 1024 * 1024
TRANSFER_S: Final = 0.15
REPEATS: Final = 3

logger = logging.getLogger(__name__)


async def measure_links(
    worker: Worker, link: ShapedLink, store: str | None, rng: random.Random
) -> dict[str, LinkProfile]:
    """The links of a worker by name: `broker`, `store`, and names of peers.

    Args:
        worker: A worker that has joined.
        link: Its emulated link.
        store: URL of the store, or None.
        rng: Chooses peers.
    """
    status = await worker.scheduler.fusion_status()
    present = {
        member["name"]: member["address"]
        for member in status["members"]
        if member["state"] != "left" and member["address"] != worker.address
    }
    chosen = rng.sample(sorted(present), min(PEERS, len(present)))
    targets: dict[str, Callable[[], Awaitable[LinkProfile]]] = {
        BROKER: lambda: _measure(_echo_of(worker.scheduler, link, is_worker=False)),
    }
    # The store before the peers: a plan without some of these is better than one without it.
    if store is not None:
        targets[STORE] = lambda: asyncio.to_thread(_measure_store, store, link)
    for name in chosen:
        neighbour = _echo_of(worker.rpc(present[name]), link, is_worker=True)
        targets[name] = partial(_measure, neighbour)
    found: dict[str, LinkProfile] = {}
    deadline = time.monotonic() + LINKS_S
    for name, measure in targets.items():
        try:
            left_s = max(0.0, deadline - time.monotonic())
            found[name] = await asyncio.wait_for(measure(), min(LINK_TIMEOUT_S, left_s))
        except Exception as error:
            # What goes wrong at a peer is raised here as what it was there: any type.
            logger.warning(
                "the link to %s was not measured: %s", name, str(error) or "no answer in time"
            )
    return found


Echo = Callable[[int, int], Awaitable[float]]


def _echo_of(peer: Any, link: ShapedLink, *, is_worker: bool) -> Echo:  # noqa: ANN401 - an rpc
    """An echo of one peer: bytes to send and to get back -> seconds.

    Only workers shape their end of the link; for the broker's, this end stands in.
    """

    async def echo(send: int, receive: int) -> float:
        data = to_serialize(bytes(send))
        begin = time.perf_counter()
        departure = link.send(send)
        await asyncio.sleep(departure.wait_s)
        shaping = {"sending_s": departure.sending_s} if is_worker else {}
        reply = await peer.fusion_echo(data=data, reply_bytes=receive, **shaping)
        wait_s = link.receive(receive, reply.get("sending_s", 0.0))
        await asyncio.sleep(wait_s if is_worker else wait_s + link.delay_s)
        return time.perf_counter() - begin

    return echo


async def _measure(echo: Echo) -> LinkProfile:
    await echo(SMALL_BYTES, SMALL_BYTES)
    round_trip_s = min([await echo(SMALL_BYTES, SMALL_BYTES) for _ in range(ECHOES)])
    return LinkProfile(
        delay_s=round_trip_s / 2,
        send_bytes_per_s=await _rate(lambda size: echo(size, SMALL_BYTES), round_trip_s),
        receive_bytes_per_s=await _rate(lambda size: echo(SMALL_BYTES, size), round_trip_s),
    )


async def _rate(transfer: Callable[[int], Awaitable[float]], round_trip_s: float) -> float:
    """Bytes per second beyond the round trip, of the best of some transfers."""
    first_s = max(await transfer(FIRST_BYTES) - round_trip_s, 1e-4)
    size = int(min(LARGEST_BYTES, max(FIRST_BYTES, FIRST_BYTES * TRANSFER_S / first_s)))
    best_s = min([await transfer(size) for _ in range(REPEATS)])
    return size / max(best_s - round_trip_s, 1e-6)


def _measure_store(url: str, link: ShapedLink) -> LinkProfile:
    """Put and get one object of some megabytes, under a name that is nobody else's; blocking."""
    store = open_store(url)
    key = f"probe/{uuid.uuid4().hex}"
    small = f"{key}-small"
    data = bytes(LARGEST_BYTES // 2)
    try:
        put_s = _timed(lambda: store.create(key, data), link.send(len(data)).wait_s)
        get_s = _timed(lambda: store.read(key), link.delay_s + link.receive(len(data), 0.0))
        store.create(small, bytes(SMALL_BYTES))
        trip_s = min(
            _timed(lambda: store.read(small), 2 * link.delay_s) for _ in range(ECHOES // 2)
        )
    finally:
        for name in (key, small):
            store.delete(name)
    return LinkProfile(
        delay_s=trip_s / 2,
        send_bytes_per_s=len(data) / max(put_s - trip_s, 1e-6),
        receive_bytes_per_s=len(data) / max(get_s - trip_s, 1e-6),
    )


def _timed(work: Callable[[], object], wait_s: float) -> float:
    begin = time.perf_counter()
    work()
    time.sleep(wait_s)
    return time.perf_counter() - begin
