"""A person's plain flow: where its tasks run, what is printed, and that nothing is left."""

import fcntl
import json
import shutil
import signal
import subprocess
from collections.abc import Callable

import pytest

from integration.cli.command import Command, poll

PLAIN = """
import asyncio, json, os, socket, time
from enum import Enum
from pathlib import Path
from prefect import flow, task, get_run_logger
import beside

class Kind(Enum):
    ONE = "one"

@task
def work(number):
    time.sleep(0.5)
    print(f"printed by task {number}")
    return beside.Answer(number, os.getpid(), os.environ["FUSION_CPUS"])

@task
async def work_async(number):
    await asyncio.sleep(0.01)
    return os.getpid()

@flow
def below():
    return work.submit(9).result().pid

@flow(name="a name with spaces")
async def main(count: int, kind: Kind = Kind.ONE, where: Path | None = None):
    get_run_logger().info("logged by the flow")
    answers = work.map(list(range(count))).result()
    assert all(type(answer) is beside.Answer for answer in answers)
    print(json.dumps({
        "own": os.getpid(),
        "pids": [answer.pid for answer in answers],
        "squares": [answer.square for answer in answers],
        "cpus": sorted({answer.cpus for answer in answers}),
        "below": below(),
        "async": work_async.submit(1).result(),
        "kind": kind.name,
        "where": str(where),
        "environment": {
            name: value for name, value in os.environ.items()
            if name.startswith(("FUSION_", "PREFECT_", "DO_NOT", "HF_"))
        },
    }))
"""

BESIDE = """
from dataclasses import dataclass

@dataclass
class Answer:
    number: int
    pid: int
    cpus: str

    @property
    def square(self):
        return self.number ** 2
"""

FAILING = """
from prefect import flow, task

@task
def work(number):
    return inner(number)

def inner(number):
    raise ValueError(f"no {number} here")

@flow
def main():
    work.submit(3).result()
"""

WAITING = """
import os, time
from pathlib import Path
from prefect import flow, task

@task
def work(number):
    Path("working").write_text(str(os.getpid()))
    time.sleep(600)

@flow
def main():
    work.submit(1).result()
"""

# A network with nothing but the loopback; where the system forbids it, the settings have to do.
ISOLATED = (
    "unshare",
    "--map-root-user",
    "--net",
    "sh",
    "-c",
    'ip link set lo up && exec "$@"',
    "sh",
)


def isolation() -> tuple[str, ...]:
    if shutil.which("unshare") is None:
        return ()
    probe = subprocess.run([*ISOLATED, "true"], capture_output=True, check=False)
    return ISOLATED if probe.returncode == 0 else ()


def test_a_plain_flow_runs_its_tasks_on_the_workers_without_a_network(
    command: Command, write: Callable[..., str]
) -> None:
    target = f"{write(PLAIN)}:main"
    write(BESIDE, "beside.py")
    command.prefix = isolation()

    done = command.run("run", target, "--set", "count=4", "--set", "kind=one", "--set", "where=/x")

    assert done.code == 0, done.err
    printed = [line for line in done.out.splitlines() if line.startswith("{")]
    [seen] = [json.loads(line) for line in printed]
    assert len(set(seen["pids"])) == 2
    assert seen["own"] not in {*seen["pids"], seen["below"], seen["async"]}
    assert {seen["below"], seen["async"]} <= set(seen["pids"])
    assert seen["squares"] == [0, 1, 4, 9]
    assert (seen["kind"], seen["where"]) == ("ONE", "/x")
    assert sum("printed by task" in line for line in done.out.splitlines()) == 5
    assert "logged by the flow" in done.err
    assert_environment(seen["environment"], command)
    command.assert_nothing_left()


def assert_environment(seen: dict[str, str], command: Command) -> None:
    assert seen["FUSION_HOME"] == str(command.home)
    assert seen["FUSION_STORE"] == str(command.home / "store")
    assert seen["FUSION_CLUSTER"].startswith("tcp://127.0.0.1:")
    assert seen["PREFECT_API_URL"].startswith("http://127.0.0.1:")
    assert seen["PREFECT_HOME"] == str(command.home / "prefect")
    assert seen["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert (seen["DO_NOT_TRACK"], seen["HF_HUB_OFFLINE"]) == ("1", "1")


def test_a_failing_flow_shows_the_persons_own_lines(
    command: Command, write: Callable[..., str]
) -> None:
    done = command.run("run", write(FAILING), "--workers", "1")

    assert done.code == 1
    assert 'flow.py", line 9, in inner' in done.err
    assert "work.submit(3).result()" in done.err
    assert "site-packages" not in done.err
    assert done.error_lines[-1] == "error: main failed with ValueError: no 3 here"
    command.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_ends_everything(
    command: Command, write: Callable[..., str], number: int, code: int
) -> None:
    command.start("run", write(WAITING), "--workers", "1")
    poll((command.folder / "working").exists, 120)
    assert len(command.listening()) >= 3

    command.send(number)

    done = command.finish(timeout_s=40)
    assert done.code == code, done.err
    if number != signal.SIGKILL:
        assert done.error_lines[-1] == "error: interrupted before flow.py was done"
        assert "Traceback" not in done.err
    command.assert_nothing_left()


def test_being_killed_while_starting_leaves_nothing(
    command: Command, write: Callable[..., str]
) -> None:
    command.start("run", write(WAITING))
    poll(lambda: len(command.processes()) >= 5, 60)

    command.send(signal.SIGKILL)

    assert command.finish().code == -signal.SIGKILL
    command.assert_nothing_left()


def test_a_lost_scheduler_is_reported_and_a_taken_home_is_left_alone(
    command: Command, write: Callable[..., str]
) -> None:
    lock = command.home / "prefect" / "fusion.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command.start("run", write(WAITING), "--workers", "1")
        poll((command.folder / "working").exists, 120)
        databases = [path.name for path in command.temporary.glob("*/prefect.db")]
        [scheduler] = [p for p in command.processes() if "dask_scheduler" in " ".join(p.cmdline())]

        scheduler.kill()

        done = command.finish(timeout_s=40)
    assert databases == ["prefect.db"]
    assert done.code == 1
    assert done.error_lines[-1].startswith("error: the scheduler ended (exit code -9)")
    command.assert_nothing_left()
