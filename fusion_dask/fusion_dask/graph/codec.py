"""Records of the IR to JSON and back, by their declared types.

Covers: canonical text (sorted keys, no spaces, one spelling per value) and strict reading: exact
keys, exact types, bounded nesting. What the values mean together is checked by `validate`.

Invariants: equal records give equal text; `decode(type, encode(record)) == record`; reading makes
records of this package and nothing else.
"""

import base64
import binascii
import dataclasses
import functools
import math
import types
import typing
from enum import Enum
from typing import Any

from fusion_dask.errors import ProgramError
from fusion_dask.graph.ir import Argument, Ref, Tag

__all__ = ["decode", "encode"]

_MAX_NESTING = 8
_MAX_TEXT = 1024
_INT64 = 1 << 63


def encode(value: Any) -> Any:  # noqa: ANN401 - this is where JSON leaves
    """JSON data of a record. Fields at their defaults are left out."""
    if isinstance(value, Ref):
        return {"r": value.name}
    if isinstance(value, Tag):
        return {"t": [value.kind, value.name]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: encode(item)
            for f in dataclasses.fields(value)
            if not _is_default(f, item := getattr(value, f.name))
        }
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": repr(value)}
    return value


def _is_default(field: dataclasses.Field[Any], item: object) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(item) is type(field.default) and item == field.default
    if field.default_factory is not dataclasses.MISSING:
        return bool(item == field.default_factory())
    return False


def decode(kind: Any, data: Any) -> Any:  # noqa: ANN401 - this is where JSON enters
    """Read JSON data as a value of a declared type.

    Raises:
        ProgramError: The data is not exactly of that type.
    """
    if Ref in typing.get_args(kind):  # the union Argument, however it was resolved
        return _argument(data, 0)
    if dataclasses.is_dataclass(kind):
        return _record(kind, data)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _tuple(kind, data)
    if origin in (typing.Union, types.UnionType):
        return _optional(kind, data)
    return _scalar(kind, data)


def _wrong(expected: str, data: object) -> ProgramError:
    return ProgramError(
        f"the program is malformed: expected {expected}, found {type(data).__name__}; it is damaged "
        "or was not made by this software"
    )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _record(kind: Any, data: object) -> Any:  # noqa: ANN401
    if not isinstance(data, dict):
        raise _wrong(kind.__name__, data)
    hints = _hints(kind)
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if not required <= data.keys() <= hints.keys():
        raise ProgramError(
            f"the program is malformed: {kind.__name__} has the wrong fields; it is damaged or was "
            "made by another version"
        )
    return kind(**{name: decode(hints[name], item) for name, item in data.items()})


def _tuple(kind: Any, data: object) -> tuple[Any, ...]:  # noqa: ANN401
    if not isinstance(data, list):
        raise _wrong("a list", data)
    items = typing.get_args(kind)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(decode(items[0], item) for item in data)
    if len(data) != len(items):
        raise _wrong(f"{len(items)} items", data)
    return tuple(decode(k, item) for k, item in zip(items, data, strict=True))


def _optional(kind: Any, data: object) -> Any:  # noqa: ANN401
    if data is None:
        return None
    (inner,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
    return decode(inner, data)


def _scalar(kind: Any, data: object) -> Any:  # noqa: ANN401
    if kind is bytes:
        return _bytes(data)
    if kind is float:
        return _float(data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if not isinstance(data, str) or data not in {member.value for member in kind}:
            raise _wrong(kind.__name__, data)
        return kind(data)
    if type(data) is not kind:
        raise _wrong(kind.__name__, data)
    if isinstance(data, str) and len(data) > _MAX_TEXT:
        raise _wrong("a short name", data)
    if isinstance(data, int) and not -_INT64 <= data < _INT64:
        raise _wrong("a 64-bit integer", data)
    return data


def _bytes(data: object) -> bytes:
    if not isinstance(data, str):
        raise _wrong("base64 text", data)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong("base64 text", data) from error


def _float(data: object) -> float:
    if isinstance(data, dict) and data.keys() == {"f"} and data["f"] in ("inf", "-inf", "nan"):
        return float(data["f"])
    if type(data) is not float:
        raise _wrong("a number", data)
    return data


def _argument(data: object, depth: int) -> Argument:
    if depth > _MAX_NESTING:
        raise _wrong("arguments nested less deeply", data)
    if data is None or isinstance(data, bool | int | str):
        return typing.cast("Argument", _scalar(type(data), data) if data is not None else None)
    if isinstance(data, list):
        return tuple(_argument(item, depth + 1) for item in data)
    if isinstance(data, dict) and data.keys() == {"r"}:
        return Ref(_scalar(str, data["r"]))
    if isinstance(data, dict) and data.keys() == {"t"}:
        return Tag(*_tuple(tuple[str, str], data["t"]))
    return _float(data)
