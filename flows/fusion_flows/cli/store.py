"""Whether the store can be written, as far as that shows without writing.

Covers: a store on this machine. Not covered: a remote one, whose own errors say what is wrong.

Invariant: nothing is created.
"""

import os
from pathlib import Path

from fusion_flows.cli.errors import InputError

__all__ = ["check_writable"]


def check_writable(url: str) -> None:
    """Refuse a local store that nothing could be written to.

    Raises:
        InputError: It lies below something that is no folder, or that is not ours to write.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in {"file", "local"}:
        return
    path = Path(rest if separator else url).expanduser().absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        raise InputError(f"the store {url} cannot be used: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(
            f"the store {url} cannot be written: no permission on {nearest}; "
            "choose another place with --store"
        )
