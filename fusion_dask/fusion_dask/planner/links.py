"""Links between the workers of a pool: alpha + bytes / beta for every ordered pair.

Of a pair that was probed, from either end, the measured delay and rate count; where both ends
measured the same direction, the sender's. Of a pair that was not:

- delay: the sum of both ends' delays to the broker, an upper bound where the triangle inequality
  holds;
- rate: the smaller of the sender's fastest known sending rate and the receiver's fastest known
  receiving rate, over all links that they measured (broker, store, peers);
- an end that measured nothing counts as `UNKNOWN`, the assumption of a home network.

Pure. Invariant: only names that belong to the pool are looked at, and their order never matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.profile import BROKER, LinkProfile
from fusion_dask.planner.records import PoolWorker

__all__ = ["UNKNOWN", "Link", "LinkTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two workers."""

    delay_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """From the first byte sent to the last one received.

        >>> Link(delay_s=0.02, bytes_per_s=1e6).seconds(500_000)
        0.52
        """
        return self.delay_s + size_bytes / self.bytes_per_s


#: A gigabit network in one building, for ends of which nothing was measured.
UNKNOWN: Final = LinkProfile(delay_s=0.00025, send_bytes_per_s=117e6, receive_bytes_per_s=117e6)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkTable:
    """All ordered pairs of a pool; row: sender, column: receiver, in the order of the pool.

    The diagonal is free: no delay, an infinite rate.
    """

    delay_s: NDArray[np.float64]
    bytes_per_s: NDArray[np.float64]

    @classmethod
    def of(cls, pool: Sequence[PoolWorker]) -> "LinkTable":
        """The links of a pool."""
        broker = np.array([_broker_delay_s(w) for w in pool])
        send = np.array([_fastest(w, "send_bytes_per_s") for w in pool])
        receive = np.array([_fastest(w, "receive_bytes_per_s") for w in pool])
        delay_s = broker[:, None] + broker[None, :]
        bytes_per_s = np.minimum(send[:, None], receive[None, :])
        index = {w.name: i for i, w in enumerate(pool)}
        # The receivers' measurements first, so that the senders' overwrite them.
        for j, worker in enumerate(pool):
            for name, link in worker.profile.links.items():
                if name in index:
                    delay_s[index[name], j] = link.delay_s
                    bytes_per_s[index[name], j] = link.receive_bytes_per_s
        for i, worker in enumerate(pool):
            for name, link in worker.profile.links.items():
                if name in index:
                    delay_s[i, index[name]] = link.delay_s
                    bytes_per_s[i, index[name]] = link.send_bytes_per_s
        np.fill_diagonal(delay_s, 0.0)
        np.fill_diagonal(bytes_per_s, np.inf)
        return cls(delay_s=delay_s, bytes_per_s=bytes_per_s)

    def between(self, sender: int, receiver: int) -> Link:
        """The link of two workers, by their places in the pool."""
        return Link(
            delay_s=float(self.delay_s[sender, receiver]),
            bytes_per_s=float(self.bytes_per_s[sender, receiver]),
        )


def _broker_delay_s(worker: PoolWorker) -> float:
    link = worker.profile.links.get(BROKER)
    return UNKNOWN.delay_s if link is None else link.delay_s


def _fastest(worker: PoolWorker, direction: str) -> float:
    links = worker.profile.links.values()
    return max(
        (float(getattr(link, direction)) for link in links),
        default=float(getattr(UNKNOWN, direction)),
    )
