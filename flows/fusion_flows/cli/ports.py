"""TCP ports of this machine's loopback.

Covers: choosing free ones and refusing taken ones. Not covered: listening on them.

Invariant: the ports of one call differ.
"""

import socket
from collections.abc import Mapping

from fusion_flows.cli.errors import InputError

__all__ = ["LOOPBACK", "check_free", "choose_two"]

LOOPBACK = "127.0.0.1"


def choose_two() -> tuple[int, int]:
    """Two ports that were free a moment ago."""
    with socket.socket() as first, socket.socket() as second:
        first.bind((LOOPBACK, 0))
        second.bind((LOOPBACK, 0))
        return first.getsockname()[1], second.getsockname()[1]


def check_free(asked: Mapping[str, int]) -> None:
    """Refuse ports that somebody listens on, or that are asked for twice.

    Args:
        asked: The port of each option.

    Raises:
        InputError: A port cannot be bound.
    """
    advice = "choose another one, or leave the option away"
    for option, port in asked.items():
        with socket.socket() as probe:
            # As servers do: a port that only waits out its last connections is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise InputError(
                    f"{option} {port}: the port cannot be used ({error.strerror}); {advice}"
                ) from None
    if len(set(asked.values())) < len(asked):
        raise InputError(f"{' and '.join(asked)} name the same port; {advice}")
