"""Names of things and keys of objects: what is allowed, and how a tensor's name becomes a path.

Covers validation and encoding only; nothing here touches a store. Invariant: a key that passed
`check_key` stays below the root of its store on every backend, and two different tensor names never
share an array path.
"""

import hashlib
import re
from urllib.parse import quote

__all__ = [
    "ATTEMPT_NAME",
    "BLOB_NAME",
    "RUN_NAME",
    "TEMPORARY_PREFIX",
    "array_path",
    "check_key",
    "check_name",
    "holds",
    "join",
]

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
ATTEMPT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

TEMPORARY_PREFIX = ".tmp-"
"""A local file that is still being written starts with this; such names are never listed."""

# File systems allow 255 bytes a name, a temporary file's name is short; the rest is room.
_LONGEST_PATH = 200
_DIGEST_DIGITS = 32


def check_name(kind: str, name: str, allowed: re.Pattern[str]) -> str:
    """Return `name` unchanged, or raise ValueError that says what is allowed.

    >>> check_name("run", "first-run", RUN_NAME)
    'first-run'
    """
    if not allowed.fullmatch(name):
        raise ValueError(f"{kind} name {name!r} is not allowed: it must match {allowed.pattern}")
    return name


def check_key(key: str) -> str:
    """Return `key` unchanged, or raise ValueError: no absolute, empty, hidden-temporary or dot part."""
    for part in key.split("/"):
        if part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) or "\\" in part:
            raise ValueError(f"object key {key!r} is not allowed")
    if "\0" in key:
        raise ValueError(f"object key {key!r} is not allowed")
    return key


def join(prefix: str, key: str) -> str:
    """Join two keys; an empty one adds nothing."""
    return f"{prefix}/{key}" if prefix and key else prefix or key


def holds(prefix: str, key: str) -> bool:
    """Say whether `key` is `prefix` itself or lies below it; the empty prefix holds everything."""
    return not prefix or key == prefix or key.startswith(f"{prefix}/")


def array_path(tensor: str) -> str:
    """Encode a tensor's name as one path segment that every file system and object store takes.

    A tensor may be called like the folder of another (`weight` and `weight/exp_avg`), and in zarr an
    array cannot hold arrays, so the slash is encoded too. Long names end in a digest.

    >>> array_path("h.0.attn.weight/exp_avg")
    'h.0.attn.weight%2Fexp_avg'
    """
    if not tensor:
        raise ValueError("a tensor needs a name")
    path = quote(tensor, safe="")
    if path[0] in "._~" or path == "zarr.json":  # zarr reserves "__", "." and its own file name
        path = f"%{ord(path[0]):02X}{path[1:]}"
    if len(path) > _LONGEST_PATH:
        digest = hashlib.sha256(tensor.encode()).hexdigest()[:_DIGEST_DIGITS]
        path = f"{path[: _LONGEST_PATH - _DIGEST_DIGITS - 1]}~{digest}"
    return path
