"""Files that only their owner reads, written whole or not at all."""

import os
import tempfile
from pathlib import Path

__all__ = ["make_private_folder", "write_private"]


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
