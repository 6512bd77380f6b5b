"""Twenty times a provider joins and quits; nothing of it stays."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cli.command import poll
from integration.cli.pool import Pool, marked, token_of

ROUNDS = 4
PROVIDERS = ("a", "b", "c", "d")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(folder=tmp_path)
    made.up()
    try:
        yield made
    finally:
        made.close()


def cycle(pool: Pool, token: str) -> None:
    """All providers join, at once, and quit."""
    commands = [
        pool.join(name, "--emulate", "cpu", token=token, environment={"FUSION_PROBE_S": "0"})
        for name in PROVIDERS
    ]
    pool.wait_for("active", *(f"{name}-0" for name in PROVIDERS))
    for command in commands:
        assert command.process is not None
        command.process.send_signal(signal.SIGINT)
    for command in commands:
        assert command.finish(60).code == 0
        assert not marked(command.mark)
        assert not list(command.temporary.iterdir())


def test_twenty_joins_leave_nothing_behind(pool: Pool) -> None:
    token = token_of(pool.fusion("up"))
    # What Dask and we make on first use is not a leak.
    cycle(pool, token)
    scheduler, gateway = pool.service("scheduler"), pool.service("gateway")
    poll(lambda: not pool.workers(), 20)
    descriptors = {p: p.num_fds() for p in (scheduler, gateway)}
    threads = {p: p.num_threads() for p in (scheduler, gateway)}
    for _ in range(ROUNDS):
        cycle(pool, token)
    poll(lambda: not pool.workers(), 20)
    members = pool.status()
    assert {m["state"] for m in members.values()} == {"left"}
    assert set(members) == {f"{name}-0" for name in PROVIDERS}
    for process in (scheduler, gateway):
        poll(
            lambda p=process: p.num_fds() <= descriptors[p],  # type: ignore[misc]
            20,
            lambda p=process: f"{p.num_fds()} descriptors, {descriptors[p]} before",  # type: ignore[misc]
        )
        assert process.num_threads() <= threads[process]
