"""Bad input to `fusion up`, `down` and `token`: one line, exit code 2, nothing started and nothing left."""

import socket

import pytest

from fusion_flows.cli.ports import choose
from integration.cli.command import Command

CASES = {
    "not an address of this machine": (["up", "--host", "192.0.2.77"], "no such address"),
    "not a port": (["up", "--port", "70000"], "--port"),
    "a folder for a store": (["up", "--store", "my/folder"], "name a store by its URL"),
    "two stores": (["up", "--store", "s3://a/b", "--store-port", "1"], "--store-port is for"),
    "no pool to list the tokens of": (["token", "list"], "`fusion up` makes one"),
    "no pool to make a token of": (["token", "new"], "`fusion up` makes one"),
    "no pool to revoke a token of": (["token", "revoke", "x"], "`fusion up` makes one"),
}


@pytest.mark.parametrize("case", CASES)
def test_is_one_line(command: Command, case: str) -> None:
    arguments, expected = CASES[case]
    command.home = command.folder / "home"

    done = command.run(*arguments, *_free(arguments))

    assert done.code == 2
    assert done.out == ""
    [line] = done.error_lines
    assert line.startswith("error: ")
    assert expected in line
    assert not command.home.exists()
    command.assert_nothing_left()


def _free(arguments: list[str]) -> list[str]:
    """Options that keep `fusion up` off the usual ports, which others may use."""
    if arguments[0] != "up":
        return []
    names = ("--port", "--scheduler-port", "--prefect-port", "--dashboard-port")
    pairs = zip(names, choose(4), strict=True)
    return [word for name, port in pairs if name not in arguments for word in (name, str(port))]


def test_a_taken_port_is_one_line(command: Command) -> None:
    command.home = command.folder / "home"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--host", "127.0.0.1", "--store-port", str(choose(1)[0])]
        done = command.run("up", *words, *_free(["up", "--prefect-port"]), "--prefect-port", port)

    assert done.code == 2
    [line] = done.error_lines
    assert line.startswith(f"error: --prefect-port {port}: the port cannot be used")
    assert not command.home.exists()
    command.assert_nothing_left()


def test_down_without_a_broker_is_no_error(command: Command) -> None:
    command.home = command.folder / "home"
    done = command.run("down")
    assert (done.code, done.err) == (0, "")
    assert f"no broker runs in {command.home}" in done.out
    assert not command.home.exists()
