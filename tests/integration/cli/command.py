"""Runs `fusion` as a person would, and looks for what it leaves behind.

Every process of a run inherits a mark in its environment, so that the tests find it whoever its
parent has become, and a temporary folder of its own.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

__all__ = ["Command", "Finished", "poll"]

MARK = "FUSION_TEST_MARK"
MAIN = (sys.executable, "-P", "-c", "from fusion_flows.cli import main; main()")
ROOT = Path(__file__).parents[3]
PACKAGES = [str(ROOT / folder) for folder in ("flows", "tasks", "fusion_dask", "storage")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


@dataclass(slots=True, kw_only=True)
class Command:
    """One `fusion` command in a folder of its own."""

    folder: Path
    home: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None
    ports: set[int] = field(default_factory=set)

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def start(self, *arguments: str) -> None:
        self.temporary.mkdir(exist_ok=True)
        unwanted = ("FUSION_", "PREFECT_", "DASK_", "CUDA_VISIBLE")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        self.process = subprocess.Popen(
            [*self.prefix, *MAIN, *arguments],
            cwd=self.folder,
            env={
                **inherited,
                "FUSION_HOME": str(self.home),
                "TMPDIR": str(self.temporary),
                "PYTHONPATH": os.pathsep.join(PACKAGES),
                "OMP_NUM_THREADS": "1",
                MARK: self.mark,
                **self.environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def finish(self, timeout_s: float = 120) -> Finished:
        assert self.process is not None
        out, err = self.process.communicate(timeout=timeout_s)
        return Finished(code=self.process.returncode, out=out, err=err)

    def run(self, *arguments: str) -> Finished:
        self.start(*arguments)
        return self.finish()

    def send(self, number: int) -> None:
        """Signal the command itself, and remember what its processes listen on."""
        assert self.process is not None
        self.ports |= self.listening()
        os.kill(self.process.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Everybody who carries the mark and is not just a zombie."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def listening(self) -> set[int]:
        ports = set()
        for process in self.processes():
            try:
                connections = process.net_connections(kind="tcp")
            except psutil.Error:
                continue
            ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        return ports

    def assert_nothing_left(self, timeout_s: float = 15) -> None:
        poll(lambda: not self.processes(), timeout_s, lambda: f"left: {self.processes()}")
        poll(lambda: not self._temporary(), timeout_s, lambda: f"left: {self._temporary()}")
        open_ports = {
            c.laddr.port for c in psutil.net_connections(kind="tcp") if c.status == "LISTEN"
        }
        assert not self.ports & open_ports

    def _temporary(self) -> list[str]:
        return sorted(os.listdir(self.temporary))

    def kill(self) -> None:
        """For a test that failed: end what it has started."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue


def poll(
    condition: Callable[[], bool], timeout_s: float, complaint: Callable[[], str] = lambda: ""
) -> None:
    """Wait until `condition` holds; fail at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, complaint() or "not in time"
        time.sleep(0.05)
