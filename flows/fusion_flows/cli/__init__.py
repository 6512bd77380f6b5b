"""The command `fusion`: one noun a file, imported when it is called.

Covers: the table of commands, and how an error becomes one line and an exit code. Not covered:
what a command does.

Invariant: `fusion --help` imports none of the commands, so it answers in a fraction of a second.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import typer

from fusion_dask.errors import FusionError
from fusion_flows.cli.errors import CliError

__all__ = ["main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noun:
    """A command: the module that holds a function of the same name, and its line in the help."""

    name: str
    summary: str

    @property
    def module(self) -> str:
        return f"fusion_flows.cli.{self.name}"


NOUNS: Final = (
    Noun(name="run", summary="Run a flow: a built-in procedure or any Prefect flow of yours."),
    Noun(name="up", summary="Make this machine the broker of a pool."),
    Noun(name="down", summary="End the broker that runs here."),
    Noun(name="token", summary="Make, list and revoke the tokens with which others join."),
    Noun(name="join", summary="Lend this machine's GPUs to a pool."),
    Noun(name="status", summary="Show who is in the pool, what it is worth and what it does."),
    Noun(name="doctor", summary="Check this machine and its pool, and say what to do."),
    Noun(name="graph", summary="Show a model as a graph of operators, cut into stages."),
    Noun(name="plan", summary="Plan a model over a pool, joined or imagined, before it runs."),
    Noun(name="simulate", summary="Simulate hours of a model on a pool: speed, losses, cost."),
    Noun(name="bench", summary="Measure this project against a reference in one run."),
)

EXIT_BAD_INPUT: Final = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code.

    Args:
        arguments: The command line without the program's name; that of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    app = _assemble(wanted=next((word for word in words if not word.startswith("-")), None))
    try:
        code = app(words, prog_name="fusion", standalone_mode=False)
    except CliError as error:
        fail(str(error), error.exit_code)
    except FusionError as error:
        fail(str(error), EXIT_BAD_INPUT)
    except typer.Abort:
        fail("interrupted", 130)
    except Exception as error:
        # Usage errors of typer have moved between packages; what they share is `format_message`.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        fail(f"{message()} (fusion --help lists what there is)", EXIT_BAD_INPUT)
    sys.exit(code)


def fail(message: str, exit_code: int) -> None:
    """Print one line on stderr and exit."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    sys.exit(exit_code)


def _assemble(*, wanted: str | None) -> typer.Typer:
    app = typer.Typer(
        name="fusion",
        help="Train, fine-tune and serve language models on a pool of consumer GPUs.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for noun in NOUNS:
        if find_spec(noun.module) is None:
            continue
        if noun.name != wanted:
            app.command(noun.name, help=noun.summary)(_listed_only)
            continue
        command = getattr(import_module(noun.module), noun.name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=noun.name)
        else:
            app.command(noun.name)(command)
    return app


def _root() -> None:
    """Train, fine-tune and serve language models on a pool of consumer GPUs."""


def _listed_only() -> None:
    raise AssertionError("a command that was not asked for is only listed")
