"""The link of an emulated device: bandwidth each way and delay, in the alpha-beta model.

A sender's bytes leave one after the other at the rate of its uplink, and arrive after the delay; a
receiver takes them in at the rate of its downlink, beginning when the first of them arrives. So one
transfer between equal links takes delay + bytes / rate, and two at once share.

Covers: the arithmetic, on a clock that is passed in. Not covered: sleeping, which the callers do.

Invariant: in any interval no more bytes pass a direction than its rate allows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fusion_dask.devices.emulation import Shape

__all__ = ["Departure", "ShapedLink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """When something that is sent will be there.

    Attributes:
        wait_s: Until its last byte has arrived.
        sending_s: Of these, between its first and its last byte.
    """

    wait_s: float
    sending_s: float


class ShapedLink:
    """One worker's link; what it answers is how long to sleep.

    Args:
        shape: Bandwidth and delay; None for a link that is not shaped.
        clock: Monotonic seconds.
    """

    def __init__(
        self, shape: Shape | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shape = shape
        self._clock = clock
        self._up_free = self._down_free = clock()

    @property
    def delay_s(self) -> float:
        """One way."""
        return 0.0 if self._shape is None else self._shape.delay_s

    def send(self, size: int) -> Departure:
        """`size` bytes leave now, or when those before have left."""
        if self._shape is None:
            return Departure(wait_s=0.0, sending_s=0.0)
        now = self._clock()
        sending_s = size / self._shape.bytes_per_s
        self._up_free = max(now, self._up_free) + sending_s
        return Departure(wait_s=self._up_free - now + self._shape.delay_s, sending_s=sending_s)

    def receive(self, size: int, sending_s: float) -> float:
        """Seconds until `size` bytes are in, whose last byte would be here now on a wide downlink.

        Args:
            size: Bytes.
            sending_s: How long ago the first of them arrived.
        """
        if self._shape is None:
            return 0.0
        now = self._clock()
        began = max(self._down_free, now - sending_s)
        self._down_free = max(now, began + size / self._shape.bytes_per_s)
        return self._down_free - now
