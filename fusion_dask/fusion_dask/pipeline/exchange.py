"""The boundary exchange as a stage sees it: publish under a versioned name, pull and wait.

`Receiver` keeps a bounded number of pulls under way in the order in which the schedule will need
them, so that transfer hides behind computation. `LocalExchange` connects stages that are threads of
one process; `DaskExchange` (in `dask_exchange`) connects workers.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from fusion_dask.errors import ExchangeTimeout
from fusion_dask.worker.outbox import BoundaryKey, Channel, Outbox

__all__ = ["Exchange", "LocalExchange", "Receiver"]


class Exchange(Protocol):
    """Carries boundary tensors between stages; at least once, in any order."""

    def publish(self, key: BoundaryKey, tensors: Sequence[torch.Tensor]) -> None:
        """Offer tensors under their name; returns at once."""

    def pull(
        self, key: BoundaryKey, received: tuple[int, int] | None
    ) -> Future[Sequence[torch.Tensor]]:
        """Ask for the tensors named `key`, and say which version of the channel has been received."""


class LocalExchange:
    """An exchange inside one process: every stage shares one outbox."""

    def __init__(self, outbox: Outbox | None = None) -> None:
        self.outbox = outbox or Outbox()

    def publish(self, key: BoundaryKey, tensors: Sequence[torch.Tensor]) -> None:
        """Offer tensors; the consumer gets the very same ones."""
        self.outbox.publish(key, tensors)

    def pull(
        self, key: BoundaryKey, received: tuple[int, int] | None
    ) -> Future[Sequence[torch.Tensor]]:
        """A future from the shared outbox."""
        return self.outbox.ask(key, received)


class Receiver:
    """Pulls boundary tensors ahead of their use.

    Args:
        exchange: Where to pull from.
        keys: Everything that will be taken, in order.
        window: Pulls under way at once.
        timeout_s: Longest wait for one boundary tensor.
        start: Version that counts as received on every channel at the start.
    """

    def __init__(
        self,
        exchange: Exchange,
        keys: Iterable[BoundaryKey],
        *,
        window: int,
        timeout_s: float,
        start: tuple[int, int] | None = None,
    ) -> None:
        self._exchange = exchange
        self._keys: Iterator[BoundaryKey] = iter(keys)
        self._window = window
        self._timeout_s = timeout_s
        self._start = start
        self._received: dict[Channel, tuple[int, int]] = {}
        self._under_way: deque[tuple[BoundaryKey, Future[Sequence[torch.Tensor]]]] = deque()
        self.waited_s = 0.0
        self._top_up()

    def take(self, key: BoundaryKey) -> Sequence[torch.Tensor]:
        """Wait for the next boundary tensor, which must be `key`.

        Raises:
            ExchangeTimeout: It did not arrive in time.
        """
        expected, future = self._under_way.popleft()
        assert expected == key, f"schedule wants {key}, prefetch has {expected}"
        begin = time.perf_counter()
        try:
            tensors = future.result(self._timeout_s)
        except TimeoutError:
            raise ExchangeTimeout(str(key), self._timeout_s) from None
        self.waited_s += time.perf_counter() - begin
        self._received[key.channel] = key.version
        self._top_up()
        return tensors

    def _top_up(self) -> None:
        while len(self._under_way) < self._window:
            key = next(self._keys, None)
            if key is None:
                return
            received = self._received.get(key.channel, self._start)
            self._under_way.append((key, self._exchange.pull(key, received)))
