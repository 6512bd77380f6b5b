"""The outbox: boundary tensors that a worker has made and its neighbours will pull.

A boundary tensor has a versioned name, the `BoundaryKey`. A consumer asks for it by that name, waits
until it is there, and with each later question on the same channel says how far it has come; only
then is a tensor dropped. So a lost answer can be asked for again, and nothing is kept that nobody
needs.

Thread-safe: the stage publishes from the task thread, the comm handler asks from the event loop.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["BoundaryKey", "Channel", "Outbox"]


class Channel(NamedTuple):
    """An ordered stream from one stage to another.

    `epoch` counts the attempts of a run: what an older attempt made is never taken for a newer's.
    `kind` is `activation`, `gradient`, `tied` (gradient of a shared parameter), `norm`, `scale` or
    `evaluation`.
    """

    run: str
    epoch: int
    kind: str
    source: int
    target: int


class BoundaryKey(NamedTuple):
    """The versioned name of what one channel carries for one microbatch of one step."""

    channel: Channel
    step: int
    microbatch: int

    @property
    def version(self) -> tuple[int, int]:
        """Order within the channel."""
        return (self.step, self.microbatch)

    def __str__(self) -> str:
        """For messages."""
        c = self.channel
        return (
            f"{c.kind} of step {self.step}, microbatch {self.microbatch}, "
            f"stage {c.source} -> {c.target} (run {c.run}, epoch {c.epoch})"
        )


@dataclass(slots=True)
class _Slot:
    ready: Future[Sequence[torch.Tensor]]


class Outbox:
    """Published boundary tensors, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[Channel, dict[tuple[int, int], _Slot]] = {}
        self._closed: dict[tuple[str, int], BaseException] = {}

    def publish(self, key: BoundaryKey, tensors: Sequence[torch.Tensor]) -> None:
        """Make tensors available under their name; publishing the same name again is a no-op."""
        slot = self._slot(key)
        if not slot.ready.done():
            slot.ready.set_result(tensors)

    def ask(
        self, key: BoundaryKey, received: tuple[int, int] | None
    ) -> Future[Sequence[torch.Tensor]]:
        """A future of the tensors named `key`; what is older than `received` or is it, is dropped."""
        if received is not None:
            with self._lock:
                slots = self._channels.get(key.channel, {})
                for version in [v for v in slots if v <= received]:
                    del slots[version]
        return self._slot(key).ready

    def fail(self, run: str, epoch: int, error: BaseException) -> None:
        """Answer every present and future question of one attempt with an error."""
        with self._lock:
            self._closed[(run, epoch)] = error
            waiting = [
                slot.ready
                for channel, slots in self._channels.items()
                if (channel.run, channel.epoch) == (run, epoch)
                for slot in slots.values()
            ]
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def check(self, run: str, epoch: int) -> None:
        """Raise the error with which an attempt was ended, if it was."""
        with self._lock:
            error = self._closed.get((run, epoch))
        if error is not None:
            raise error

    def drop(self, run: str, before_epoch: int) -> None:
        """Forget the attempts of a run older than `before_epoch`."""
        with self._lock:
            for channel in [c for c in self._channels if c.run == run and c.epoch < before_epoch]:
                del self._channels[channel]
            for attempt in [a for a in self._closed if a[0] == run and a[1] < before_epoch]:
                del self._closed[attempt]

    def __len__(self) -> int:
        """Number of tensors that are held and were published."""
        with self._lock:
            return sum(
                slot.ready.done() for slots in self._channels.values() for slot in slots.values()
            )

    def _slot(self, key: BoundaryKey) -> _Slot:
        with self._lock:
            slots = self._channels.setdefault(key.channel, {})
            slot = slots.get(key.version)
            if slot is None:
                slot = slots[key.version] = _Slot(Future())
                error = self._closed.get((key.channel.run, key.channel.epoch))
                if error is not None:
                    slot.ready.set_exception(error)
            return slot
