import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.cli.command import PACKAGES, Command, poll
from integration.cli.pool import Pool, token_of


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all runs, so that Prefect's slow first start is paid once."""
    return tmp_path_factory.mktemp("fusion-home")


@pytest.fixture
def command(tmp_path: Path, home: Path) -> Iterator[Command]:
    """A command whose every trace has to be gone when the test ends."""
    started = Command(folder=tmp_path, home=home)
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A broker for the tests of one module; starting one takes seconds."""
    made = Pool(folder=tmp_path_factory.mktemp("pool"))
    made.up()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def token(pool: Pool) -> str:
    """The token that `fusion up` prints, also when it is called again."""
    return token_of(pool.fusion("up"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a file into the folder that commands run in; returns its name."""

    def write_file(text: str, name: str = "flow.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write_file


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A plain Dask cluster of somebody else, with one worker: its address."""
    folder = tmp_path_factory.mktemp("cluster")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    python = [sys.executable, "-P", "-m"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PACKAGES)}
    flags = ["--no-dashboard", "--host", "127.0.0.1"]
    commands = [
        [*python, "distributed.cli.dask_scheduler", *flags, "--port", address.rpartition(":")[2]],
        [*python, "distributed.cli.dask_worker", address, *flags, "--nthreads", "1", "--no-nanny"],
    ]
    with (folder / "log").open("wb") as log:
        processes = [
            subprocess.Popen(line, env=environment, cwd=folder, stdout=log, stderr=log)
            for line in commands
        ]
        try:
            poll(lambda: b"Registered to" in (folder / "log").read_bytes(), 60)
            yield address
        finally:
            for process in processes:
                process.kill()
                process.wait()
