"""Files that only their owner reads, written whole or not at all.

Covers: folders, files, and a lock between processes. Not covered: what is in them.

Invariant: a reader sees the old content or the new, whenever the writer stops.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["locked", "make_private_folder", "write_private"]


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner enters."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    """Write a file with mode 0600 in one step; what was there before is replaced."""
    # mkstemp makes files of mode 0600.
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the file stays, empty."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
