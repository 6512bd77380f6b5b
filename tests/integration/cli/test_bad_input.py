"""Bad input: one line, exit code 2, nothing started and nothing left."""

import socket
from collections.abc import Callable

import pytest

from integration.cli.command import Command

FLOW = """
from prefect import flow

@flow
def main(steps: int = 3):
    raise SystemExit("must not run")
"""

CASES = {
    "no such procedure": (["pretrian"], "did you mean pretrain?"),
    "no such file": (["nowhere.py"], "there is no file nowhere.py"),
    "unknown option": (["flow.py", "--worker", "3"], "--worker"),
    "not a number": (["flow.py", "--workers", "many"], "'--workers'"),
    "a store below a file": (["flow.py", "--store", "flow.py/store"], "is not a folder"),
    "no flow of that name": (["flow.py:mian"], "its flows are: main"),
    "unknown parameter": (["flow.py", "--set", "step=4"], "did you mean steps?"),
    "wrong type": (["flow.py", "--set", "steps=few"], "--set steps=few: expected int"),
    "nothing to resume": (["flow.py", "--resume", "x"], "no parameter named resume"),
    "unreachable cluster": (["flow.py", "--cluster", "tcp://127.0.0.1:9"], "no Dask scheduler"),
}


@pytest.mark.parametrize("case", CASES)
def test_is_one_line(command: Command, write: Callable[..., str], case: str) -> None:
    arguments, expected = CASES[case]
    write(FLOW)

    done = command.run("run", *arguments)

    assert done.code == 2
    assert done.out == ""
    [line] = done.error_lines
    assert line.startswith("error: ")
    assert expected in line
    command.assert_nothing_left()


def test_a_taken_port_is_one_line(command: Command, write: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = command.run("run", write(FLOW), "--prefect-port", port)

    assert done.code == 2
    [line] = done.error_lines
    assert line.startswith(f"error: --prefect-port {port}: the port cannot be used")
    command.assert_nothing_left()
