"""From `--set name=value` to the arguments of a flow.

Covers: which names a flow offers, and reading a value by the annotation of its name. If exactly
one parameter is a pydantic model, its fields are offered by their own names, those of nested
models with dots; every other parameter by its name. Not covered: what the values mean.

Invariant: every text either becomes a value that pydantic accepts for its annotation, or an
InputError of one line.
"""

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fusion_flows.cli.errors import InputError

__all__ = ["Slot", "arguments", "read", "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A name that can be set: the parameter it belongs to, the way inside it, and its type."""

    parameter: str
    path: tuple[str, ...]
    annotation: Any


def slots(function: Callable[..., Any]) -> dict[str, Slot]:
    """Every name that `--set` may use for a flow with this function, in order."""
    annotations = _annotations(function)
    models = {name: model for name, kind in annotations.items() if (model := _model_of(kind))}
    found: dict[str, Slot] = {}
    if len(models) == 1:
        [(parameter, model)] = models.items()
        for path, annotation in _fields(model):
            found[".".join(path)] = Slot(parameter=parameter, path=path, annotation=annotation)
    # A parameter beats a field of the same name: without its own name it could not be set at all.
    for name, annotation in annotations.items():
        found[name] = Slot(parameter=name, path=(), annotation=annotation)
    return found


def arguments(function: Callable[..., Any], settings: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments that `name=value` texts mean for a function.

    Raises:
        InputError: A name is unknown, given twice or missing, or a value does not fit.
    """
    offered = slots(function)
    given: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for text in settings:
        name, slot = _find(text, offered)
        if name in given:
            raise InputError(f"--set {name} is given twice; give it once")
        given[name] = read(name, text.partition("=")[2], slot.annotation)
        if slot.path:
            _put(parts.setdefault(slot.parameter, {}), slot.path, given[name])
    values = {name: value for name, value in given.items() if not offered[name].path}
    for slot in offered.values():
        if slot.path and slot.parameter not in values and _is_required(function, slot.parameter):
            parts.setdefault(slot.parameter, {})
    for parameter, changes in parts.items():
        values[parameter] = _model(function, parameter, changes, values)
    _check_complete(function, values)
    return values


def read(name: str, text: str, annotation: Any) -> Any:  # noqa: ANN401
    """Read one value; `name` is for the error.

    Raises:
        InputError: The text is no value of that type.

    >>> read("steps", "20", int), read("ids", "[1, 2]", list[int]), read("seed", "none", int | None)
    (20, [1, 2], None)
    """
    if text.lower() in {"none", "null"} and NoneType in typing.get_args(annotation):
        return None
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    if annotation is Any:
        try:
            return json.loads(text)
        except ValueError:
            return text
    try:
        return adapter.validate_strings(text)
    except ValidationError as first:
        try:
            return adapter.validate_json(text)
        except ValidationError as second:
            # The text is JSON of the wrong content, or no JSON at all and was meant as a word.
            error = first if second.errors()[0]["type"] == "json_invalid" else second
            raise InputError(
                f"--set {name}={text}: expected {_spell(annotation)} ({_reason(error)})"
            ) from None


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InputError(
            f"an annotation of {function.__name__} cannot be read: {error}; "
            "import that name at the top of its file"
        ) from error
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: hints.get(name, Any)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in kinds
    }


def _model_of(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401
    """The model of `Model`, `Model | None` or `Annotated[Model, ...]`."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _fields(model: type[BaseModel]) -> Iterable[tuple[tuple[str, ...], Any]]:
    for name, field in model.model_fields.items():
        yield (name,), field.rebuild_annotation()
        if nested := _model_of(field.annotation):
            for path, annotation in _fields(nested):
                yield (name, *path), annotation


def _find(text: str, offered: Mapping[str, Slot]) -> tuple[str, Slot]:
    name, equals, _ = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: write it as name=value")
    if name not in offered:
        close = get_close_matches(name, offered, n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        names = f"its names are: {', '.join(offered)}" if offered else "it has no parameters"
        raise InputError(f"--set {name}: the flow has no such name; {hint}{names}")
    return name, offered[name]


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:  # noqa: ANN401
    for key in path[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise InputError(f"--set {key} and --set {'.'.join(path)} exclude each other")
        tree = below
    if path[-1] in tree:
        raise InputError(f"--set {path[-1]} and a name inside of it exclude each other")
    tree[path[-1]] = value


def _model(
    function: Callable[..., Any],
    parameter: str,
    changes: Mapping[str, Any],
    values: Mapping[str, Any],
) -> BaseModel:
    model = _model_of(_annotations(function)[parameter])
    assert model is not None
    base = values.get(parameter, inspect.signature(function).parameters[parameter].default)
    data = base.model_dump() if isinstance(base, BaseModel) else {}
    try:
        return model.model_validate(_merged(data, changes))
    except ValidationError as error:
        raise InputError(f"--set {_reason(error)}") from None


def _merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(old, value)
        else:
            merged[key] = value
    return merged


def _is_required(function: Callable[..., Any], name: str) -> bool:
    return inspect.signature(function).parameters[name].default is inspect.Parameter.empty


def _check_complete(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    missing = [
        name
        for name in _annotations(function)
        if name not in values and _is_required(function, name)
    ]
    if missing:
        what = " ".join(f"--set {name}=..." for name in missing)
        raise InputError(f"the flow needs a value for {', '.join(missing)}; add {what}")


def _spell(annotation: Any) -> str:  # noqa: ANN401
    if typing.get_origin(annotation) is typing.Annotated:
        return _spell(typing.get_args(annotation)[0])
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return inspect.formatannotation(annotation).replace("pathlib.", "")


def _reason(error: ValidationError) -> str:
    """All that pydantic says, in one line without its links."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"])))
        for item in error.errors(include_url=False)[:3]
    )
