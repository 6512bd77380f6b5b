"""What a place for bytes has to do; `fusion_storage.store.Store` is the face of it.

Keys were checked by the caller. Every method raises `StoreUnavailable` when the place itself fails.
"""

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Backend"]


class Backend(Protocol):
    """Named bytes in one place, seen from one process."""

    def read(self, key: str) -> bytes | None:
        """Return the object, or None when there is none."""

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists, in one atomic and durable act; see `Store.create`."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the object, whole or not at all."""

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the bytes of each object at or below the prefix."""

    def children(self, prefix: str) -> list[str]:
        """Return the names directly below the prefix; some may be emptied folders."""

    def delete(self, prefix: str) -> None:
        """Remove every object at or below the prefix."""

    def flush(self, prefix: str) -> None:
        """Return when everything written below the prefix would survive a power cut."""

    def probe(self) -> None:
        """Raise `StoreUnavailable` unless objects can be written here; leave nothing behind."""
