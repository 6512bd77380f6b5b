"""TCP ports of this machine's loopback.

Covers: choosing free ones and refusing taken ones. Not covered: listening on them.

Invariant: the ports of one call differ.
"""

import contextlib
import socket
from collections.abc import Mapping

from fusion_flows.cli.errors import InputError

__all__ = ["LOOPBACK", "check_free", "choose"]

LOOPBACK = "127.0.0.1"


def choose(count: int, *, below: int = 65536) -> tuple[int, ...]:
    """Ports that were free a moment ago.

    Args:
        count: How many.
        below: All of them are smaller than this.
    """
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        while len(chosen) < count:
            probe = held.enter_context(socket.socket())
            probe.bind((LOOPBACK, 0))
            if (port := probe.getsockname()[1]) < below:
                chosen.append(port)
    return tuple(chosen)


def check_free(
    asked: Mapping[str, int],
    *,
    host: str = LOOPBACK,
    advice: str = "choose another one, or leave the option away",
) -> None:
    """Refuse ports that somebody listens on, or that are asked for twice.

    Args:
        asked: The port of each option.
        host: The address to listen on.
        advice: What to do about it.

    Raises:
        InputError: A port cannot be bound.
    """
    for option, port in asked.items():
        with socket.socket() as probe:
            # As servers do: a port that only waits out its last connections is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise InputError(
                    f"{option} {port}: the port cannot be used ({error.strerror}); {advice}"
                ) from None
    if len(set(asked.values())) < len(asked):
        raise InputError(f"{' and '.join(asked)} name the same port; {advice}")
