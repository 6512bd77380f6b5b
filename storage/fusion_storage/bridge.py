"""A part of our store as a zarr store.

One adapter for every backend, instead of zarr's own per-protocol stores: those write local files
without syncing, bind an asynchronous client to one event loop, and turn a missing bucket into
zeros. Each call runs in a thread, so that zarr's event loop is never blocked.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Protocol

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)

from fusion_storage.names import join

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype

__all__ = ["KeyStore", "cut"]


class _Bytes(Protocol):
    """The part of `fusion_storage.store.Store` that is needed here."""

    @property
    def url(self) -> str: ...
    def read(self, key: str) -> bytes | None: ...
    def create(self, key: str, data: bytes) -> bool: ...
    def put(self, key: str, data: bytes | memoryview) -> None: ...
    def children(self, prefix: str = "") -> list[str]: ...
    def delete(self, prefix: str) -> None: ...
    def list(self, prefix: str = "") -> list[str]: ...


class KeyStore(Store):
    """The objects below one prefix, as zarr wants to see them."""

    def __init__(self, store: _Bytes, prefix: str, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self._store = store
        self._prefix = prefix

    def with_read_only(self, read_only: bool = False) -> "KeyStore":
        """Return the same objects with another permission."""
        return KeyStore(self._store, self._prefix, read_only=read_only)

    async def get(
        self, key: str, prototype: "BufferPrototype", byte_range: ByteRequest | None = None
    ) -> "Buffer | None":
        """Return an object or a part of it; None when there is none."""
        data = await asyncio.to_thread(self._store.read, join(self._prefix, key))
        return None if data is None else prototype.buffer.from_bytes(cut(data, byte_range))

    async def get_partial_values(
        self,
        prototype: "BufferPrototype",
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> "list[Buffer | None]":
        """Return parts of several objects."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        """Say whether there is an object of exactly this name."""
        path = join(self._prefix, key)
        return path in await asyncio.to_thread(self._store.list, path)

    async def set(self, key: str, value: "Buffer") -> None:
        """Write an object."""
        self._check_writable()
        data = memoryview(value.as_buffer_like())
        await asyncio.to_thread(self._store.put, join(self._prefix, key), data)

    async def set_if_not_exists(self, key: str, value: "Buffer") -> None:
        """Write an object unless there is one; zarr's default asks first and then overwrites."""
        self._check_writable()
        path = join(self._prefix, key)
        await asyncio.to_thread(self._store.create, path, value.to_bytes())

    async def delete(self, key: str) -> None:
        """Remove an object."""
        self._check_writable()
        await asyncio.to_thread(self._store.delete, join(self._prefix, key))

    async def delete_dir(self, prefix: str) -> None:
        """Remove all objects below a prefix."""
        await self.delete(prefix)

    async def list(self) -> AsyncIterator[str]:
        """Yield every key."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield every key that starts with `prefix`."""
        for key in await asyncio.to_thread(self._store.list, self._prefix):
            relative = key.removeprefix(f"{self._prefix}/")
            if relative.startswith(prefix):
                yield relative

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`."""
        path = join(self._prefix, prefix.rstrip("/"))
        for name in await asyncio.to_thread(self._store.children, path):
            yield name

    @property
    def supports_writes(self) -> bool:
        """Objects can be written."""
        return True

    @property
    def supports_deletes(self) -> bool:
        """Objects can be removed."""
        return True

    @property
    def supports_listing(self) -> bool:
        """Objects can be listed."""
        return True

    def __eq__(self, other: object) -> bool:
        """Say whether both show the same objects."""
        return (
            isinstance(other, KeyStore)
            and self._store == other._store
            and self._prefix == other._prefix
        )

    __hash__ = None  # type: ignore[assignment]  # as zarr's own stores

    def __str__(self) -> str:
        """Return the address."""
        return f"{self._store.url}/{self._prefix}"

    def __repr__(self) -> str:
        """Return the address."""
        return f"KeyStore({str(self)!r})"


def cut(data: bytes, byte_range: ByteRequest | None) -> bytes:
    """Return the part of the bytes that zarr asked for.

    >>> cut(b"abcdef", SuffixByteRequest(2))
    b'ef'
    """
    if byte_range is None:
        return data
    if isinstance(byte_range, RangeByteRequest):
        return data[byte_range.start : byte_range.end]
    if isinstance(byte_range, OffsetByteRequest):
        return data[byte_range.offset :]
    assert isinstance(byte_range, SuffixByteRequest)
    return data[max(0, len(data) - byte_range.suffix) :]
