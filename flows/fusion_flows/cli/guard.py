"""The process that outlives the command line long enough to clean up after it.

Run as a script, as the leader of a process group that every other process of an embedded cluster
is born into. It reads a pipe whose only write end belongs to the command line: end of file means
that the command line is done or gone, however it ended, SIGKILL included. Then the group and what
descends from it are ended and the folders of the run are removed.

Covers: the end of a run. Not covered: how the group came to be (`group.py`).

Invariant: when it exits, no member of the group and none of the folders is left.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence

import psutil

__all__ = ["GRACE_S", "main"]

# From SIGTERM to SIGKILL: the Prefect server needs about a second to write what it still holds.
GRACE_S = 4.0
POLL_S = 0.02


def main(pipe: int, folders: Sequence[str]) -> None:
    """Wait for end of file on `pipe`, then end the group and remove `folders`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(pipe, 1):
        pass
    doomed = _members()
    _signal(doomed, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(map(_alive, doomed)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    doomed |= _members()
    _signal(doomed, signal.SIGKILL)
    while any(map(_alive, doomed)) and time.monotonic() < deadline + GRACE_S:
        time.sleep(POLL_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _members() -> set[psutil.Process]:
    """Everybody in this process group but us, and their descendants in whatever group."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                found |= {process, *process.children(recursive=True)}
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return found


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(processes: set[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
