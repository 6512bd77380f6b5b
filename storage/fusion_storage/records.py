"""What is known of a checkpoint: its parts and their objects.

Plain frozen data, without a store; `fusion_storage.checkpoint` makes and reads it. Invariant: a part
that `from_json` accepts names only keys below the root of a store.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_storage.names import ATTEMPT_NAME, check_key, check_name
from fusion_storage.sealed import JSON
from fusion_storage.verified import Files

__all__ = ["Checkpoint", "Part"]

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one worker wrote of one checkpoint.

    Attributes:
        part: Whose it is, a stage's name for example.
        prefix: Where its objects are.
        tensors: The names of its tensors, sorted.
        files: Key below the prefix -> (bytes, SHA-256).
    """

    part: str
    prefix: str
    tensors: tuple[str, ...]
    files: Files

    @property
    def bytes(self) -> int:
        """All its bytes in the store."""
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> dict[str, JSON]:
        """Return the part as plain JSON."""
        return {
            "part": self.part,
            "prefix": self.prefix,
            "tensors": list(self.tensors),
            "files": {key: [size, digest] for key, (size, digest) in self.files.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Part":
        """Read what `to_json` made.

        Raises:
            ValueError: it is not such a record.
        """
        try:
            files = {
                check_key(key): (int(size), _check_digest(digest))
                for key, (size, digest) in record["files"].items()
            }
            return cls(
                part=check_name("part", record["part"], ATTEMPT_NAME),
                prefix=check_key(record["prefix"]),
                tensors=tuple(str(name) for name in record["tensors"]),
                files=files,
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not the record of a checkpoint's part: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed snapshot of a run.

    Attributes:
        run: The run's name.
        step: The number of steps that it contains.
        parts: What the workers wrote.
        metadata: What was committed with it: data position, seeds, losses.
    """

    run: str
    step: int
    parts: tuple[Part, ...]
    metadata: Mapping[str, Any]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return tuple(sorted(name for part in self.parts for name in part.tensors))

    @property
    def bytes(self) -> int:
        """All its bytes in the store, the manifest aside."""
        return sum(part.bytes for part in self.parts)


def _check_digest(digest: str) -> str:
    if not _SHA256.fullmatch(digest):
        raise ValueError(f"not a SHA-256: {digest!r}")
    return digest
