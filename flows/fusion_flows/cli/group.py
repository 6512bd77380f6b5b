"""Child processes that end with this one, however it ends.

Covers: starting children in one process group with a guard (`guard.py`) at its head, their logs,
and ending them all. Not covered: what the children are (`cluster.py`).

Invariant: there is one way to end, closing the pipe to the guard, and it is also what the kernel
does when this process dies.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusion_flows.cli import guard

__all__ = ["Child", "ProcessGroup"]

STOP_TIMEOUT_S: Final = 2 * guard.GRACE_S + 5
TAIL_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process of the group and the file that holds what it said."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs."""
        return self.process.poll()

    def last_words(self, lines: int = 8) -> str:
        """The last lines of its log, on one line."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(said[-lines:]) or "it said nothing"


class ProcessGroup:
    """Starts children and ends them together.

    Args:
        logs: A folder for what they say; one that goes when they end, by default.
    """

    def __init__(self, logs: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fusion-run-"))
        self._logs = logs or self.folder
        self.children: list[Child] = []
        reader, self._writer = os.pipe()
        # A process that the flow forks must not keep the pipe open beyond our death.
        os.register_at_fork(after_in_child=self._forget)
        try:
            # -P: the folder of a script would come first on its import path otherwise.
            self._guard = subprocess.Popen(
                [sys.executable, "-P", guard.__file__, str(reader), str(self.folder)],
                pass_fds=[reader],
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
        except OSError:
            shutil.rmtree(self.folder)
            raise
        finally:
            os.close(reader)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        shares_stdout: bool = False,
        ask_to_end: bool = False,
        inherit_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> Child:
        """Start one process.

        Args:
            name: Unique name, also that of its log.
            command: Program and arguments.
            environment: All of its environment but the place for temporary files, which is ours.
            shares_stdout: Whether it prints where we print; its log holds stderr only then.
            ask_to_end: Whether it has something to write when it ends.
            inherit_fds: Open files to keep open in it.
            cwd: The folder that it runs in; ours, by default.
        """
        path = self._logs / f"{name}.log"
        # A child that is started again goes on in its log.
        with path.open("ab") as log:
            process = subprocess.Popen(
                list(command),
                # Also what libraries drop there goes when the run goes.
                env={**environment, "TMPDIR": str(self.folder)},
                pass_fds=list(inherit_fds),
                process_group=self._guard.pid,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=None if shares_stdout else log,
                stderr=log,
            )
        if ask_to_end:
            os.write(self._writer, f"{process.pid}\n".encode())
        child = Child(name=name, process=process, log=path)
        self.children.append(child)
        return child

    def stop(self) -> None:
        """End every process and remove the folder; a second call does nothing."""
        if self._writer < 0:
            return
        os.close(self._writer)
        self._writer = -1
        try:
            done = self._guard.wait(timeout=STOP_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            done = False
        if not done:
            # The guard itself was killed or is stuck: do its work the blunt way.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)
        for child in self.children:
            child.process.wait()

    def _forget(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
