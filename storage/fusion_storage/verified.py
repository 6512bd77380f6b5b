"""zarr stores that record what is written and verify what is read.

Plain zarr reads a missing object as zeros and swapped chunks as valid. Here the record made on the
way out (key -> size and SHA-256) is the truth on the way in. Invariant: a `VerifyingStore` returns
exactly the bytes that its `RecordingStore` took, or raises `IntegrityError` that names the object.
"""

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from zarr.abc.store import ByteRequest, Store
from zarr.storage import WrapperStore

from fusion_storage.bridge import cut
from fusion_storage.errors import IntegrityError

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype

__all__ = ["Files", "RecordingStore", "VerifyingStore", "verify"]

Files: TypeAlias = Mapping[str, tuple[int, str]]
"""Key -> (bytes, SHA-256 in hex)."""

# Hashing this much takes less time than handing it to a thread.
_INLINE_BYTES = 2**16

_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


def verify(key: str, data: bytes | None, size: int, sha256: str) -> bytes:
    """Return `data` if it is what was recorded.

    Raises:
        IntegrityError: it is missing, short, long or altered; names the object.
    """
    if data is None:
        raise IntegrityError(key, "it is missing")
    if len(data) != size:
        raise IntegrityError(key, f"it has {len(data)} bytes instead of {size}")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise IntegrityError(key, "its content does not match its SHA-256")
    return data


class RecordingStore(WrapperStore[Store]):
    """Writes each object of a fresh, private prefix once, and remembers its size and digest.

    What it did not write itself is absent: that is true of a private prefix, and saves zarr's
    questions to the store.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._files: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()

    @property
    def files(self) -> Files:
        """What was written so far, by sorted key."""
        with self._lock:
            return dict(sorted(self._files.items()))

    async def set(self, key: str, value: "Buffer") -> None:
        """Write and record one object; the same bytes again are no second write.

        Raises:
            ValueError: other bytes were already written under this key.
        """
        view = memoryview(value.as_buffer_like())
        if len(view) < _INLINE_BYTES:
            entry = len(view), hashlib.sha256(view).hexdigest()
        else:
            entry = len(view), (await asyncio.to_thread(hashlib.sha256, view)).hexdigest()
        with self._lock:
            known = self._files.get(key)
        if known == entry:
            return
        if known is not None:
            raise ValueError(f"object {key} would be written twice with different content")
        await self._store.set(key, value)
        with self._lock:
            self._files[key] = entry

    async def set_if_not_exists(self, key: str, value: "Buffer") -> None:
        """Write and record one object unless it was written before."""
        if not await self.exists(key):
            await self.set(key, value)

    async def get(
        self, key: str, prototype: "BufferPrototype", byte_range: ByteRequest | None = None
    ) -> "Buffer | None":
        """Return an object that was written through this store."""
        if not await self.exists(key):
            return None
        return await self._store.get(key, prototype, byte_range)

    async def get_partial_values(
        self, prototype: "BufferPrototype", key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> "list[Buffer | None]":
        """Return parts of objects that were written through this store."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        """Say whether the object was written through this store."""
        with self._lock:
            return key in self._files

    async def delete(self, key: str) -> None:
        """Refuse: what is recorded is immutable."""
        raise ValueError(f"object {key} is immutable")

    async def delete_dir(self, prefix: str) -> None:
        """Allow only what removes nothing: zarr clears the place of a new array."""
        with self._lock:
            taken = [key for key in self._files if key.startswith(prefix)]
        if taken:
            raise ValueError(f"object {taken[0]} is immutable")

    def with_read_only(self, read_only: bool = False) -> "RecordingStore":
        """Refuse a second view: it would record apart."""
        if read_only:
            raise ValueError("a recording store is written only")
        return self


class VerifyingStore(WrapperStore[Store]):
    """Reads what the record lists, and nothing else; every object is checked as a whole."""

    def __init__(self, store: Store, files: Files, *, place: str = "") -> None:
        """Wrap a store.

        Args:
            store: Where the objects are.
            files: The record, by key within `store`.
            place: What goes before a key in an error message.
        """
        super().__init__(store.with_read_only(True))
        self._files = files
        self._place = place

    async def get(
        self, key: str, prototype: "BufferPrototype", byte_range: ByteRequest | None = None
    ) -> "Buffer | None":
        """Return an object, or a part of one that was verified as a whole.

        Raises:
            IntegrityError: it is not what was recorded, or is no recorded chunk.
        """
        entry = self._files.get(key)
        if entry is None:
            if key.rpartition("/")[2] in _METADATA:  # zarr asks which kind of node there is
                return None
            raise IntegrityError(self._place + key, "the manifest does not list it")
        found = await self._store.get(key, prototype, None)
        data = None if found is None else found.to_bytes()
        if entry[0] < _INLINE_BYTES:
            checked = verify(self._place + key, data, *entry)
        else:
            checked = await asyncio.to_thread(verify, self._place + key, data, *entry)
        return prototype.buffer.from_bytes(cut(checked, byte_range))

    async def get_partial_values(
        self, prototype: "BufferPrototype", key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> "list[Buffer | None]":
        """Return parts of verified objects."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def _get_many(
        self, requests: "Iterable[tuple[str, BufferPrototype, ByteRequest | None]]"
    ) -> "AsyncGenerator[tuple[str, Buffer | None], None]":
        for key, prototype, part in requests:
            yield key, await self.get(key, prototype, part)

    async def exists(self, key: str) -> bool:
        """Say whether the record lists the object."""
        return key in self._files

    async def list(self) -> AsyncIterator[str]:
        """Yield every recorded key."""
        for key in sorted(self._files):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield every recorded key that starts with `prefix`."""
        for key in sorted(self._files):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the recorded names directly below `prefix`."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        below = {k[len(start) :].partition("/")[0] for k in self._files if k.startswith(start)}
        for name in sorted(below):
            yield name

    def with_read_only(self, read_only: bool = False) -> "VerifyingStore":
        """Stay read-only.

        Raises:
            ValueError: asked for a writable view.
        """
        if not read_only:
            raise ValueError("a verifying store is read only")
        return self
