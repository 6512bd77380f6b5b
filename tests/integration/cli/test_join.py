"""`fusion join` in the hands of a person: again, in a hurry, by the clock; and what a run gets from it."""

import datetime as dt
import re
import signal
import time
from pathlib import Path

import pytest
from distributed import Client
from distributed.security import Security

from fusion_dask.security.identity import pools
from fusion_dask.security.roles import Role
from integration.cli.command import Command, Finished, poll
from integration.cli.pool import ENVIRONMENT, Pool, marked


def interrupt(provider: Command) -> None:
    assert provider.process is not None
    provider.process.send_signal(signal.SIGINT)


def leave(provider: Command) -> Finished:
    interrupt(provider)
    finished = provider.finish(60)
    assert finished.code == 0, finished.err
    assert not marked(provider.mark)
    return finished


def test_a_killed_worker_comes_back_and_a_machine_that_joins_again_keeps_its_name(
    pool: Pool, token: str
) -> None:
    provider = pool.join("attic", "--emulate", "cpu", token=token)
    before = pool.wait_for("active", "attic-0")["attic-0"]["address"]
    (worker,) = [p for p in marked(provider.mark) if "distributed.cli.dask_worker" in p.cmdline()]
    worker.kill()
    pool.wait(lambda ms: ms["attic-0"]["address"] not in {before, ""})
    pool.wait_for("active", "attic-0")
    assert re.search(
        r"attic-0 is lost \(exit code -9\); started again in [12] s", leave(provider).err
    )

    # Neither name nor token.
    provider.environment = ENVIRONMENT
    provider.start("join", pool.address, "--emulate", "cpu")
    pool.wait_for("active", "attic-0")
    assert "attic-0 left" in leave(provider).err
    assert pool.status()["attic-0"]["reason"] == "its provider takes it back"


def test_a_busy_worker_is_waited_for_and_a_second_ctrl_c_leaves_at_once(
    pool: Pool, token: str
) -> None:
    provider = pool.join("hasty", "--emulate", "cpu", token=token)
    address = pool.wait_for("active", "hasty-0")["hasty-0"]["address"]
    (user,) = [i for i in pools(pool.home) if i.role is Role.USER]
    security = Security(
        require_encryption=True,
        tls_ca_file=str(user.ca),
        tls_client_cert=str(user.certificate),
        tls_client_key=str(user.key),
    )
    with Client(pool.scheduler, security=security, set_as_default=False) as client:
        task = client.submit(time.sleep, 600, workers=[address], pure=False)
        poll(lambda: bool(client.processing().get(address)), 30)
        interrupt(provider)
        pool.wait_for("draining", "hasty-0")
        assert provider.process is not None
        assert provider.process.poll() is None
        interrupt(provider)
        finished = provider.finish(60)
        task.cancel()
    assert finished.code == 130
    assert "hasty-0 finishes its segment first; Ctrl-C again leaves at once" in finished.err
    poll(lambda: not marked(provider.mark), 20)
    poll(lambda: not list(provider.temporary.iterdir()), 20)
    pool.wait_for("left", "hasty-0")


def test_outside_of_its_hours_a_machine_is_not_lent(pool: Pool, token: str) -> None:
    now = dt.datetime.now()
    opens, closes = (f"{now + dt.timedelta(hours=hours):%H:%M}" for hours in (2, 3))
    provider = pool.join("night", "--emulate", "cpu", "--lend", f"{opens}-{closes}", token=token)
    assert provider.process is not None
    assert provider.process.stderr is not None
    assert provider.process.stderr.readline() == f"not lent until {opens}\n"
    assert leave(provider).err == ""
    assert "night-0" not in pool.status()


def test_a_run_on_the_pool_learns_what_a_run_on_this_machine_does(
    pool: Pool, token: str, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the quick brown fox jumps over a lazy dog. " * 2000)
    settings = "steps=8 checkpoint_every=4 layers=2 width=32 context=32 batch=8 data=texts"
    small = [word for setting in settings.split() for word in ("--set", setting)]

    def losses(name: str, home: Path, *options: str) -> list[str]:
        command = Command(folder=tmp_path, home=home)
        try:
            command.start("run", "pretrain", "--set", f"name={name}", *small, *options)
            finished = command.finish(200)
        finally:
            command.kill()
        assert finished.code == 0, finished.err
        assert (f"on the pool at {pool.address}" in finished.err) == (name == "pooled")
        found = re.findall(r"step \d+/8 .*?loss +([\d.]+)", finished.out + finished.err)
        assert found
        return found

    provider = pool.join("pair", "--emulate", "cpu,cpu", token=token)
    pool.wait_for("active", "pair-0", "pair-1")
    pooled = losses("pooled", pool.home)
    leave(provider)
    alone = losses("alone", home, "--local")
    assert [float(loss) for loss in pooled] == pytest.approx([float(x) for x in alone], abs=2e-4)
    workers = (tmp_path / "fusion-runs" / "pooled" / "summary.md").read_text()
    assert "pair-" in workers
