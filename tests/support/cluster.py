"""A real cluster on this machine: a scheduler and workers as processes that tests may kill."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from distributed import Client

from fusion_dask.config import as_environment

__all__ = ["ProcessCluster", "process_cluster"]

TESTS = Path(__file__).resolve().parents[1]


class ProcessCluster:
    """Processes and their scheduler's address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "scheduler.json"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._scheduler = self._start(
            "distributed.cli.dask_scheduler",
            ["--host", "127.0.0.1", "--port", "0", "--no-dashboard"],
            "fusion_dask.broker",
            {},
        )
        deadline = time.monotonic() + 60
        while not self._file.exists():
            assert time.monotonic() < deadline, self.log("fusion_dask.broker")
            time.sleep(0.02)

    def client(self) -> Client:
        """A client, once every worker that was started has joined."""
        client = Client(scheduler_file=str(self._file), set_as_default=False)
        client.wait_for_workers(len(self.workers), timeout=90)
        return client

    def add_worker(
        self, name: str, *, cpus: str | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start one more worker with one kernel thread, or with the variables of a share."""
        pins = {"FUSION_THREADS": "1", "OMP_NUM_THREADS": "1", "FUSION_PROBE_S": "0"}
        if cpus is not None:
            pins["FUSION_CPUS"] = cpus
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0"]
        self.workers[name] = self._start(
            "distributed.cli.dask_worker",
            [*options, "--name", name, "--local-directory", str(self._folder)],
            "fusion_dask.worker",
            {**pins, **(variables or {})},
        )

    def kill(self, name: str) -> None:
        """kill -9 a worker."""
        process = self.workers.pop(name)
        process.kill()
        process.wait(30)

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        """End every process."""
        # Told by a signal and by its scheduler at once, a Dask worker without a nanny may wait for ever.
        for processes in ([*self.workers.values()], [self._scheduler]):
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)

    def _start(
        self, module: str, options: list[str], preload: str, pins: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        search = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        common = ["--scheduler-file", str(self._file), "--preload", preload]
        name = options[options.index("--name") + 1] if "--name" in options else preload
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *options, *common],
                env={**os.environ, **as_environment(), **pins, "PYTHONPATH": search},
                stdout=log,
                stderr=log,
            )


@contextlib.contextmanager
def process_cluster(workers: int, *, pin: bool = False) -> Iterator[ProcessCluster]:
    """A cluster with workers w0, w1, ...; with `pin`, worker i has core i for itself."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cluster = ProcessCluster(Path(folder))
        try:
            for i in range(workers):
                cluster.add_worker(f"w{i}", cpus=str(i) if pin else None)
            yield cluster
        finally:
            cluster.close()
