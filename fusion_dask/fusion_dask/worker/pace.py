"""The pace of an emulated device: computing that takes longer than it would.

After each piece of work the thread sleeps until the wall time is what a slower device would have taken:
the CPU time that the work used, divided by the fraction. CPU time and not wall time, so that several
emulated workers on few cores keep their ratios. An emulated worker has one kernel thread, and autograd
runs the backward of CPU tensors on the calling thread, so the thread's CPU time is all of it.

Invariant: what is computed does not depend on the pace.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

__all__ = ["Pace"]


class Pace:
    """Slows the calling thread to a fraction of its speed.

    Args:
        fraction: Above 0 and at most 1; 1 changes nothing.
        clock: Wall time in seconds.
        cpu_clock: CPU time of the calling thread in seconds.
        sleep: Sleeps for some seconds.
    """

    def __init__(
        self,
        fraction: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.fraction = fraction
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sleep = sleep

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Around a piece of work."""
        if self.fraction >= 1.0:
            yield
            return
        began, used = self._clock(), self._cpu_clock()
        yield
        owed = (self._cpu_clock() - used) / self.fraction
        left = owed - (self._clock() - began)
        if left > 0:
            self._sleep(left)
