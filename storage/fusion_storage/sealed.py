"""Small JSON records that carry their own digest: manifests, run records.

Invariant: `unseal(seal(record))` is `record`, and no other bytes than those that `seal` made are
accepted; the same record always gives the same bytes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fusion_storage.errors import IntegrityError

__all__ = ["JSON", "seal", "unseal"]

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

_FORMAT = 1


def seal(record: Mapping[str, JSON]) -> bytes:
    """Serialise a record with its SHA-256.

    Raises:
        ValueError: a number is not finite, or a value is not JSON.
    """
    try:
        body = _canonical(record)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the record is not plain JSON with finite numbers: {error}") from error
    return _envelope(body)


def unseal(data: bytes, key: str) -> dict[str, Any]:
    """Parse what `seal` made.

    Args:
        data: The bytes of the object.
        key: The name of the object, for the error.

    Raises:
        IntegrityError: the bytes are not exactly those of a sealed record of this format.
    """
    try:
        envelope = json.loads(data)
    except ValueError as error:
        raise IntegrityError(key, "it is not JSON") from error
    if not isinstance(envelope, dict) or not isinstance(envelope.get("record"), dict):
        raise IntegrityError(key, "it is not a sealed record")
    if envelope.get("format") != _FORMAT:
        raise IntegrityError(key, f"its format is {envelope.get('format')!r}, not {_FORMAT}")
    record: dict[str, Any] = envelope["record"]
    try:
        again = _envelope(_canonical(record))
    except ValueError as error:  # NaN is read but never written
        raise IntegrityError(key, "it holds a number that is not finite") from error
    if again != data:
        raise IntegrityError(key, "its content does not match its SHA-256")
    return record


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(
        record, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain
    ).encode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _envelope(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return b'{"format":%d,"sha256":"%s","record":%s}' % (_FORMAT, digest.encode(), body)
