"""What the command line reports as one line.

    CliError                the command ends with one line and an exit code
    ├── InputError          what was asked for cannot be done; nothing was started
    ├── StartError          a child process did not come up
    └── ChildLost           a child process that everything depends on ended during the run

Every constructor takes exactly the arguments that `Exception.args` keeps.
"""

from typing import ClassVar

__all__ = ["ChildLost", "CliError", "InputError", "StartError"]


class CliError(Exception):
    """An error of the command line, worded for the person who typed the command."""

    exit_code: ClassVar[int] = 1


class InputError(CliError):
    """A wrong argument, file or address; found before any process was started."""

    exit_code = 2


class StartError(CliError):
    """A part of the embedded cluster did not start."""


class ChildLost(CliError):
    """A part of the embedded cluster ended while the flow was running."""
