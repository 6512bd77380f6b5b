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

import psutil  # type: ignore[import-untyped]

__all__ = ["GRACE_S", "main"]

# For those that have something to write: the Prefect server takes 0.3 s on a busy machine.
GRACE_S = 4.0
POLL_S = 0.02


def main(pipe: int, folders: Sequence[str]) -> None:
    """Wait for end of file on `pipe`, then end the group and remove `folders`.

    Args:
        pipe: What arrives on it are the ids, one a line, of the processes to ask before they are
            killed; the others have nothing to lose and some take seconds to close.
        folders: To remove at the end.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = b""
    while part := os.read(pipe, 4096):
        told += part
    everybody = _members()
    asked = {process for process in everybody if str(process.pid).encode() in told.split()}
    _signal(asked, signal.SIGTERM)
    _signal(everybody - asked, signal.SIGKILL)
    _wait(asked)
    everybody |= _members()
    _signal(everybody, signal.SIGKILL)
    _wait(everybody)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(processes: set[psutil.Process]) -> None:
    deadline = time.monotonic() + GRACE_S
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


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
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
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
