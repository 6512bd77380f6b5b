"""The errors of the storage package.

    StorageError
    ├── StoreUnavailable    the store cannot be reached, read or written
    ├── IntegrityError      an object is missing, short or altered
    ├── CommitConflict      another writer was first
    └── NotFound            no such run, checkpoint, tensor, blob or corpus

An error carries its data and the next action for the person, in one line, and survives pickling:
every constructor takes exactly the arguments that `Exception.args` keeps.
"""

from collections.abc import Sequence

__all__ = ["CommitConflict", "IntegrityError", "NotFound", "StorageError", "StoreUnavailable"]

_MOST_LISTED = 12


class StorageError(Exception):
    """An error of the world of storage, worded for the person who has to act on it."""


class StoreUnavailable(StorageError):
    """The store cannot be used now."""

    def __init__(self, url: str, reason: str, action: str) -> None:
        super().__init__(url, reason, action)
        self.url = url
        self.reason = reason
        self.action = action

    def __str__(self) -> str:
        """Return the message for the person."""
        return _one_line(f"cannot use the store {self.url}: {self.reason}; {self.action}")


class IntegrityError(StorageError):
    """What is stored is not what was written."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        """Return the message for the person."""
        return _one_line(
            f"object {self.key} is damaged: {self.reason}; restore it from a copy of the store, or "
            "go back to an older checkpoint"
        )


class CommitConflict(StorageError):
    """Something with this name was written by someone else first; nothing was changed."""

    def __init__(self, name: str, action: str) -> None:
        super().__init__(name, action)
        self.name = name
        self.action = action

    def __str__(self) -> str:
        """Return the message for the person."""
        return _one_line(f"{self.name} was already written by another writer; {self.action}")


class NotFound(StorageError):
    """What was asked for does not exist; what does exist is listed."""

    def __init__(self, name: str, url: str, existing: Sequence[str]) -> None:
        existing = tuple(existing)
        super().__init__(name, url, existing)
        self.name = name
        self.url = url
        self.existing = existing

    def __str__(self) -> str:
        """Return the message for the person."""
        more = len(self.existing) - _MOST_LISTED
        there = ", ".join(self.existing[:_MOST_LISTED]) or "nothing of that kind"
        tail = f" and {more} more" if more > 0 else ""
        return _one_line(f"there is no {self.name} in {self.url}; there is: {there}{tail}")


def _one_line(text: str) -> str:
    return " ".join(text.split())
