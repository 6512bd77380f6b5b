"""Ctrl-C, SIGTERM and SIGHUP: leave by the same door, and not forever.

Covers: turning the first signal into an exception in the main thread, and leaving at once on the
second one or when the first did not lead anywhere. Not covered: cleaning up; the guard does it when
this process is gone, whichever way.

Invariant: `GRACE_S` after the first signal this process has ended.
"""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Final

__all__ = ["SIGNALS", "Interrupted", "install", "leave_within_grace", "listen"]

GRACE_S: Final = 20.0
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The person or the system wants this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 130 after Ctrl-C."""
        return 128 + self.number


def install() -> None:
    """Raise Interrupted in the main thread on the first signal, leave on the second."""
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        code = 128 + number
        if received:
            os._exit(code)
        received.append(number)
        leave_within_grace(code)
        raise Interrupted(number)

    for number in SIGNALS:
        signal.signal(number, on_signal)


def listen() -> Sequence[int]:
    """Note the first signal instead, for one who finishes in his own time; leave on the second.

    Returns:
        The signals that were received; it grows.
    """
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    for number in SIGNALS:
        signal.signal(number, on_signal)
    return received


def leave_within_grace(code: int) -> None:
    """End this process with `code` in `GRACE_S` at the latest; the guard does what is left."""
    timer = threading.Timer(GRACE_S, os._exit, [code])
    timer.daemon = True
    timer.start()
