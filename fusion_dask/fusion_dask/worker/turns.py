"""Workers of one machine take turns at what they would spoil for each other.

Covers: a lock in a folder that they share. Invariant: who ends, however, gives his turn back.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["turn"]

POLL_S: Final = 0.05


@contextlib.contextmanager
def turn(path: Path, ended: threading.Event) -> Iterator[None]:
    """Wait for this worker's turn, or until it has ended.

    Args:
        path: The lock; a file that is made when it is not there.
        ended: Ends the waiting.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not ended.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                ended.wait(POLL_S)
        yield
    finally:
        os.close(lock)
