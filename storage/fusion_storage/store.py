"""`open_store`: named immutable bytes under a URL.

A plain path or file:// is a directory, memory:// lives in this process, anything else goes through
fsspec. Covers keys, atomicity and durability; knows nothing of tensors or checkpoints. Invariants:
an object is whole or absent, `create` has at most one winner per content, a listing is never stale,
and a `Store` may be pickled or carried over a fork, since each process opens its own connection.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fusion_storage.bridge import KeyStore
from fusion_storage.local import LocalBackend
from fusion_storage.names import check_key
from fusion_storage.remote import FsspecBackend, plain_dialect

if TYPE_CHECKING:
    import zarr.abc.store

    from fusion_storage.backend import Backend

__all__ = ["Store", "open_store"]

_LOCAL = ("file", "local")
_S3 = ("s3", "s3a")


def open_store(url: str | Path, **storage_options: Any) -> "Store":  # noqa: ANN401
    """Name a store; nothing is connected or written yet, see `Store.check_writable`.

    Args:
        url: A path, or file://, memory://, s3://bucket/prefix, or any URL that fsspec speaks.
        **storage_options: Passed to fsspec: credentials, endpoint, timeouts. Never shown.

    Raises:
        ValueError: the URL holds a password, or a local store was given options.
    """
    text = os.fspath(url)
    protocol, separator, rest = text.partition("://")
    if not separator:
        protocol, rest = "file", text
    elif urlsplit(text).password is not None:
        raise ValueError(
            f"a store's URL must not hold a password ({protocol}://...): give it as an option or "
            "through the environment"
        )
    if protocol in _LOCAL:
        if storage_options:
            raise ValueError(f"a local store takes no options, got {sorted(storage_options)}")
        if not rest:
            raise ValueError("a local store needs a path")
        return Store(f"file://{Path(rest).expanduser().absolute()}", {})
    return Store(text.rstrip("/"), storage_options)


class Store:
    """Named immutable bytes in one place; make it with `open_store`."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url
        self._options = dict(options)
        self._opened: tuple[int, Backend] | None = None

    @property
    def url(self) -> str:
        """The address, without any option or secret."""
        return self._url

    def read(self, key: str) -> bytes | None:
        """Return the object, or None when there is none.

        Raises:
            StoreUnavailable: the store cannot be reached or read.
        """
        return self._backend().read(check_key(key))

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists, atomically and durably.

        True means that the object now holds exactly `data`, written by this call or by an earlier
        one with equal bytes: a lost answer cannot be told from the latter. Who must be the only
        writer puts something of their own in the data.

        Raises:
            StoreUnavailable: the store cannot be reached or written.
        """
        return self._backend().create(check_key(key), data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object under a name that nobody else uses; whole or not at all.

        Raises:
            StoreUnavailable: the store cannot be reached or written.
        """
        self._backend().put(check_key(key), data)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the bytes of every object at or below `prefix`, by sorted key."""
        return dict(sorted(self._backend().sizes(_check_prefix(prefix)).items()))

    def children(self, prefix: str = "") -> list[str]:
        """Return the names directly below `prefix`; some may be folders without any object."""
        return self._backend().children(_check_prefix(prefix))

    def delete(self, prefix: str) -> None:
        """Remove the object `prefix`, or every object below it; absent ones are no error."""
        self._backend().delete(check_key(prefix))

    def flush(self, prefix: str) -> None:
        """Return when all that was written below `prefix` would survive a power cut."""
        self._backend().flush(check_key(prefix))

    def zarr(self, prefix: str) -> "zarr.abc.store.Store":
        """Return the objects below `prefix` as a zarr store, plain and unverified."""
        return KeyStore(self, check_key(prefix))

    def check_writable(self) -> None:
        """Try a write before any work starts; nothing is left behind.

        Raises:
            StoreUnavailable: it failed; says why and what to do.
        """
        self._backend().probe()

    def list(self, prefix: str = "") -> list[str]:
        """Return the keys of the objects at or below `prefix`, sorted; `a` does not hold `ab`."""
        return [*self.sizes(prefix)]

    def _backend(self) -> "Backend":
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            self._opened = process, self._open()
        return self._opened[1]

    def _open(self) -> "Backend":
        protocol, _, rest = self._url.partition("://")
        if protocol in _LOCAL:
            return LocalBackend(Path(rest))
        if protocol in _S3:
            from fusion_storage.s3 import dialect  # botocore takes a second to import

            return FsspecBackend(self._url, dialect(self._options))
        return FsspecBackend(self._url, plain_dialect(protocol, self._options))

    def __getstate__(self) -> tuple[str, dict[str, Any]]:
        """Return what another process needs to open the same store."""
        return self._url, self._options

    def __setstate__(self, state: tuple[str, dict[str, Any]]) -> None:
        """Name the store; it is opened at first use."""
        self._url, self._options = state
        self._opened = None

    def __eq__(self, other: object) -> bool:
        """Say whether both name the same store with the same options."""
        return isinstance(other, Store) and self.__getstate__() == other.__getstate__()

    def __hash__(self) -> int:
        """Hash the address."""
        return hash(self._url)

    def __repr__(self) -> str:
        """Return the address; options may be secret."""
        return f"Store({self._url!r})"


def _check_prefix(prefix: str) -> str:
    return check_key(prefix) if prefix else prefix
