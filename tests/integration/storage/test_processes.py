"""Real processes: killed at any moment, racing each other, forked, out of space."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from fusion_storage.checkpoint import (
    checkpoint_steps,
    collect,
    latest,
    load_checkpoint,
    read_tensors,
)
from fusion_storage.store import Store, open_store
from integration.storage import workers

KILLS = 20
ANSWER_S = 60.0

# Fresh processes without the half minute that twenty imports of torch would take. The server does
# not see pytest's import path, so it loads only what is installed.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "zarr", "fsspec", "fusion_storage.checkpoint"])

Answer = TypeVar("Answer")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def answer_of(connection: Connection, kind: type[Answer]) -> Answer:
    assert connection.poll(ANSWER_S), "the process did not answer"
    answer = connection.recv()
    assert isinstance(answer, kind)
    return answer


def steps_still_sent(connection: Connection) -> list[int]:
    """Return the steps that a dead process had acknowledged."""
    steps = []
    while connection.poll(0):
        try:
            steps.append(answer_of(connection, int))
        except EOFError:
            break
    return steps


def assert_whole(store: Store, step: int, *, salt: int = 0) -> None:
    checkpoint = load_checkpoint(store, workers.RUN, step)
    expected = workers.state_of(step, salt=salt)
    found = read_tensors(checkpoint, store, checkpoint.tensor_names)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} of step {step}"


def test_a_writer_killed_at_any_moment_leaves_the_last_commit_whole(store: Store) -> None:
    moments = random.Random(0)
    acknowledged = 0
    torn = 0
    step_s = 0.2
    for kill in range(KILLS):
        ours, theirs = _PROCESSES.Pipe(duplex=False)
        writer = _PROCESSES.Process(
            target=workers.write_checkpoints, args=(store, f"attempt-{kill}", theirs), daemon=True
        )
        writer.start()
        theirs.close()
        assert answer_of(ours, str) == "ready"
        if kill == 0:
            began_s = time.monotonic()
            acknowledged = answer_of(ours, int)
            step_s = time.monotonic() - began_s
        time.sleep(moments.uniform(0, 2 * step_s))  # the moment of the fault, not a wait for it
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(ANSWER_S)
        assert writer.exitcode == -signal.SIGKILL
        acknowledged = max([acknowledged, *steps_still_sent(ours)])
        ours.close()

        newest = latest(store, workers.RUN)
        assert newest is not None
        assert acknowledged <= newest.step <= acknowledged + 1
        for step in checkpoint_steps(store, workers.RUN):
            assert_whole(store, step)
        torn += bool(store.list(f"runs/{workers.RUN}/data/{newest.step + 1:08d}"))

    assert torn > 0, "no kill fell into a write: the moments test nothing"
    collect(store, workers.RUN, keep=1)
    (last,) = checkpoint_steps(store, workers.RUN)
    assert last >= acknowledged
    assert_whole(store, last)


def test_of_four_processes_exactly_one_commits(store: Store) -> None:
    for step in range(1, 6):
        ready = _PROCESSES.Barrier(4)
        pipes = [_PROCESSES.Pipe(duplex=False) for _ in range(4)]
        writers = [
            _PROCESSES.Process(
                target=workers.commit_when_all_are_ready,
                args=(store, number, step, ready, theirs),
                daemon=True,
            )
            for number, (_, theirs) in enumerate(pipes)
        ]
        for writer in writers:
            writer.start()
        won = [answer_of(ours, bool) for ours, _ in pipes]
        for writer in writers:
            writer.join(ANSWER_S)
            assert writer.exitcode == 0
        assert won.count(True) == 1
        winner = won.index(True)
        assert load_checkpoint(store, workers.RUN, step).metadata == {"salt": winner}
        assert_whole(store, step, salt=winner)


def run_alone(act: Callable[[Store, Connection], None], store: Store, kind: type[Answer]) -> Answer:
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=act, args=(store, theirs), daemon=True)
    process.start()
    answer = answer_of(ours, kind)
    process.join(ANSWER_S)
    assert process.exitcode == 0
    return answer


def test_a_write_that_the_disk_refuses_leaves_nothing(store: Store, tmp_path: Path) -> None:
    message = run_alone(workers.write_above_the_file_size_limit, store, str)
    assert "File too large" in message
    assert "free space" in message
    assert store.list() == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_reads_on_both_sides_of_a_fork(store: Store) -> None:
    assert run_alone(workers.read_on_both_sides_of_a_fork, store, tuple) == (True, 0)
