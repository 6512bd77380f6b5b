"""Noticing during a run that something it depends on has ended.

Covers: watching children from a thread and interrupting the main thread. Not covered: single lost
workers, which Dask and the engine survive.

Invariant: a flow never waits for a process that is gone.
"""

import signal
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Monitor"]

POLL_S: Final = 0.5


class Monitor:
    """Calls `look` now and then; interrupts the main thread when it returns a reason."""

    def __init__(self, look: Callable[[], str | None]) -> None:
        self._look = look
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            if self._look() is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    def __enter__(self) -> "Monitor":
        """Start watching."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()
