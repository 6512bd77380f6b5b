"""What the processes of these tests do; a fresh process imports this module by name."""

import os
import resource
import signal
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch
from torch import Tensor

from fusion_storage.checkpoint import collect, commit, latest, read_tensors, write_part
from fusion_storage.errors import CommitConflict, StoreUnavailable
from fusion_storage.store import Store

__all__ = [
    "RUN",
    "commit_when_all_are_ready",
    "read_on_both_sides_of_a_fork",
    "state_of",
    "write_above_the_file_size_limit",
    "write_checkpoints",
]

RUN = "run"
_ARRAYS = 6
_ROWS = 200


def state_of(step: int, *, salt: int = 0) -> dict[str, Tensor]:
    """Make the tensors of one step, different in each."""
    generator = torch.Generator().manual_seed(1000 * salt + step)
    return {f"h.{n}.w": torch.randn(_ROWS, 256, generator=generator) for n in range(_ARRAYS)}


def write_step(store: Store, step: int, attempt: str, *, salt: int = 0) -> None:
    """Write and commit one step in two parts."""
    named = state_of(step, salt=salt)
    halves = [dict(list(named.items())[n::2]) for n in range(2)]
    parts = [
        write_part(store, run=RUN, step=step, part=f"stage-{n}", attempt=attempt, tensors=half)
        for n, half in enumerate(halves)
    ]
    commit(store, run=RUN, step=step, parts=parts, metadata={"salt": salt})


def write_checkpoints(store: Store, attempt: str, acknowledge: Connection) -> None:
    """Go on from the newest checkpoint until killed; say each step after its commit."""
    newest = latest(store, RUN)
    acknowledge.send("ready")
    for step in count(1 if newest is None else newest.step + 1):
        write_step(store, step, attempt)
        acknowledge.send(step)
        collect(store, RUN, keep=2)


def commit_when_all_are_ready(
    store: Store, number: int, step: int, ready: Barrier, answer: Connection
) -> None:
    """Race the other processes for one commit; say whether it was won."""
    part = write_part(
        store,
        run=RUN,
        step=step,
        part="all",
        attempt=f"w{number}",
        tensors=state_of(step, salt=number),
    )
    ready.wait(timeout=60)
    try:
        commit(store, run=RUN, step=step, parts=[part], metadata={"salt": number})
    except CommitConflict:
        answer.send(False)
    else:
        answer.send(True)


def write_above_the_file_size_limit(store: Store, answer: Connection) -> None:
    """Meet an error in the middle of a write, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.put("large", bytes(200_000))
    except StoreUnavailable as error:
        answer.send(str(error))
    else:
        answer.send("it was written")


def read_on_both_sides_of_a_fork(store: Store, answer: Connection) -> None:
    """Read before a fork, and after it in the parent and in the child."""
    write_step(store, 1, "a")
    newest = latest(store, RUN)
    assert newest is not None
    expected = state_of(1)
    read_tensors(newest, store, expected)
    child = os.fork()
    found = read_tensors(newest, store, expected)
    good = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    if child == 0:
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    answer.send((good, os.waitstatus_to_exitcode(status)))
