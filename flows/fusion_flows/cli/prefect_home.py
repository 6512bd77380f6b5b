"""The database of the Prefect server, so that its slow first start is paid once.

Covers: who may use the shared database. A fresh one costs about six seconds of migrations; the one
below FUSION_HOME is kept. One server at a time: a run beside it gets a database of its own. Not
covered: starting the server.

Invariant: the lock lasts as long as the server that inherits it, not just as long as this process.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from fusion_flows.cli.errors import InputError

__all__ = ["Claim", "claim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A database for one server, and the open lock file to hand to that server if it is shared."""

    database: Path
    lock: int | None


def claim(home: Path, *, scratch: Path) -> Claim:
    """The database in `home` if it is free, else a new one in `scratch`.

    Raises:
        InputError: The home cannot be written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = os.open(home / "fusion.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InputError(
            f"{error.filename or home} cannot be written ({error.strerror}); "
            "set FUSION_HOME to a folder of yours"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return Claim(database=scratch / "prefect.db", lock=None)
    return Claim(database=home / "prefect.db", lock=lock)
