"""A store on anything fsspec speaks: memory://, s3://, gs://, abfs://, sftp:// and so on.

`create` is atomic where the file system can do it: one conditional PUT on S3, an exclusive create
in memory, `mode="create"` of gcsfs and adlfs. On the others fsspec first asks whether the object
exists and then writes, so that two writers within milliseconds can both write; the read-back makes
all but the last of them notice. Do not share such a store between two runs of one name.

Invariant: nothing here answers from a cache of listings, and no instance outlives a fork (`Store`
opens a new backend in each process).
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec  # type: ignore[import-untyped]

from fusion_storage.errors import StoreUnavailable
from fusion_storage.names import holds, join

__all__ = ["Dialect", "FsspecBackend", "plain_dialect"]

_PROBE = b"probe"

_WITHOUT_FOLDERS = ("memory", "gs", "gcs", "abfs", "abfss", "az", "oss", "r2")

# Two threads of one process never race each other in the exists-then-write fallback.
_CREATING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one protocol differs from plain fsspec.

    Attributes:
        options: Complete storage options.
        errors: What the client raises when the place itself fails.
        create: Exclusive write: (file system, path, data) to False when something is there.
        is_place_missing: Tells a missing bucket from a missing object.
        has_folders: Folders must exist before objects; elsewhere making one would make a bucket.
    """

    options: Mapping[str, Any]
    errors: tuple[type[Exception], ...]
    create: Callable[[Any, str, bytes], bool]
    is_place_missing: Callable[[Exception], bool]
    has_folders: bool


def plain_dialect(protocol: str, options: Mapping[str, Any]) -> Dialect:
    """Return how to talk to a file system that fsspec knows and we do not."""
    return Dialect(
        options={"use_listings_cache": False, "skip_instance_cache": True, **options},
        errors=(OSError,),
        create=_create,
        is_place_missing=lambda _: False,
        has_folders=protocol not in _WITHOUT_FOLDERS,
    )


class FsspecBackend:
    """Objects below one path of one fsspec file system."""

    def __init__(self, url: str, dialect: Dialect) -> None:
        self._url = url
        self._dialect = dialect
        with self._unavailable("open", ""):
            try:
                protocol, _, _ = url.partition("://")
                self._fs = fsspec.filesystem(protocol, **dialect.options)
                self._root = str(self._fs._strip_protocol(url)).rstrip("/")
            except (ImportError, ValueError, TypeError) as error:
                raise StoreUnavailable(
                    url, str(error), "check the address, its options and the installed extras"
                ) from error

    def read(self, key: str) -> bytes | None:
        """Return the object, or None when there is none."""
        with self._unavailable("read", key):
            try:
                return bytes(self._fs.cat_file(self._path(key)))
            except FileNotFoundError as error:
                if self._dialect.is_place_missing(error):
                    raise
                return None

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists.

        A lost answer to our own successful write looks like a lost race, so the object is read back.
        """
        path = self._path(key)
        with self._unavailable("write", key):
            self._make_folder_of(path)
            return self._dialect.create(self._fs, path, data) or self.read(key) == data

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the object in one request; never through `open`, which publishes torn ones."""
        path = self._path(key)
        with self._unavailable("write", key):
            self._make_folder_of(path)
            self._fs.pipe_file(path, bytes(data))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of each object at or below the prefix; emptied folders are no objects."""
        with self._unavailable("list", prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(prefix), detail=True)
            except FileNotFoundError as error:
                if self._dialect.is_place_missing(error):
                    raise
                return {}
            keys = {self._key(path): info for path, info in found.items()}
            return {
                key: int(info["size"])
                for key, info in keys.items()
                if info["type"] == "file" and not key.endswith("/") and holds(prefix, key)
            }

    def children(self, prefix: str) -> list[str]:
        """Return the names directly below the prefix."""
        with self._unavailable("list", prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(prefix), detail=False)
            except (FileNotFoundError, NotADirectoryError) as error:
                if self._dialect.is_place_missing(error):
                    raise
                return []
            keys = {self._key(str(path).rstrip("/")) for path in found}
            return sorted(key.rpartition("/")[2] for key in keys if key and key != prefix)

    def delete(self, prefix: str) -> None:
        """Remove every object at or below the prefix."""
        with self._unavailable("delete", prefix):
            paths = [self._path(key) for key in self.sizes(prefix)]
            if paths:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm(paths)

    def flush(self, prefix: str) -> None:
        """Return at once: a write that returned is durable as far as the place can tell."""

    def probe(self) -> None:
        """Write, read back and remove one small object."""
        key = f"probe-{uuid.uuid4().hex}"
        self.put(key, _PROBE)
        found = self.read(key)
        self.delete(key)
        if found != _PROBE:
            raise StoreUnavailable(self._url, "a written object cannot be read back", _ACTION)

    def _path(self, key: str) -> str:
        return join(self._root, key)

    def _key(self, path: str) -> str:
        # Some file systems list with a leading slash, some without, whatever they were asked for.
        return path.lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")

    def _make_folder_of(self, path: str) -> None:
        if self._dialect.has_folders:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @contextlib.contextmanager
    def _unavailable(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except self._dialect.errors as error:
            reason = f"cannot {verb} {key or 'there'}: {error or type(error).__name__}"
            raise StoreUnavailable(self._url, reason, _ACTION) from error


_ACTION = "check the address, the network and the credentials"


def _create(file_system: Any, path: str, data: bytes) -> bool:  # noqa: ANN401 - fsspec is untyped
    with _CREATING:
        try:
            file_system.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True
