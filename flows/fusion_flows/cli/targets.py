"""From what a person typed to a Prefect flow.

Covers: built-in procedures by name, and `file.py` or `file.py:name` with any flow in it, loaded as
`python file.py` would load it. Not covered: its parameters (`parameters.py`).

Invariant: a target that cannot be run is an InputError that lists what there is.
"""

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from prefect import Flow

from fusion_flows.cli.errors import InputError

__all__ = ["BUILT_IN", "Target", "resolve"]

# Name of the procedure -> module; its flow carries the same name.
BUILT_IN: Final = MappingProxyType({"pretrain": "fusion_flows.pretrain"})

# Every worker has these, also when a flow lies beside them.
OURS: Final = frozenset({"fusion_flows", "fusion_tasks", "fusion_dask", "fusion_storage"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A flow, and the modules of its author that no worker can import."""

    name: str
    flow: Flow[..., Any]
    own_modules: tuple[ModuleType, ...]


def resolve(text: str) -> Target:
    """Find and load the flow that `text` names.

    Raises:
        InputError: There is no such procedure, file or flow, or the file does not load.
    """
    if text in BUILT_IN:
        flow = getattr(import_module(BUILT_IN[text]), text)
        return Target(name=text, flow=flow, own_modules=())
    file_name, _, flow_name = text.partition(":")
    path = Path(file_name).expanduser()
    if path.suffix != ".py":
        raise InputError(_no_such(text))
    if not path.is_file():
        raise InputError(f"there is no file {file_name}; {_usage()}")
    module = _load(path.resolve())
    name, flow = _pick(module, flow_name, file_name)
    return Target(name=name, flow=flow, own_modules=_siblings(module, path.resolve().parent))


def _load(path: Path) -> ModuleType:
    name = path.stem
    if name in sys.modules:
        # A file called like something that is already imported must not replace it.
        name = f"{name}_flow_file"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = _line_of(error, path)
        raise InputError(
            f"{path.name} does not load: {type(error).__name__}: {error}{line}"
        ) from error
    return module


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the file it happened: the innermost frame that belongs to it."""
    if isinstance(error, SyntaxError):
        return ""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"


def _pick(module: ModuleType, wanted: str, file_name: str) -> tuple[str, Flow[..., Any]]:
    flows = {name: value for name, value in vars(module).items() if isinstance(value, Flow)}
    listed = ", ".join(sorted(flows))
    if wanted:
        if wanted not in flows:
            what = f"its flows are: {listed}" if flows else "it has no flow at all"
            raise InputError(f"{file_name} has no flow named {wanted}; {what}")
        return wanted, flows[wanted]
    if not flows:
        raise InputError(f"{file_name} has no flow; decorate a function with @flow from prefect")
    if len(flows) > 1:
        flows = {n: f for n, f in flows.items() if f.fn.__module__ == module.__name__} or flows
    if len(flows) > 1:
        raise InputError(f"{file_name} has several flows; pick one as {file_name}:NAME of {listed}")
    return next(iter(flows.items()))


def _siblings(module: ModuleType, folder: Path) -> tuple[ModuleType, ...]:
    """The flow's module and every top-level module or package that was imported from `folder`."""
    found = {module.__name__: module}
    for name, candidate in list(sys.modules.items()):
        if "." in name or name in OURS or not isinstance(candidate, ModuleType):
            continue
        file = getattr(candidate, "__file__", None)
        places = [file] if file else list(getattr(candidate, "__path__", []))
        if any(_top_level_of(Path(place)) == folder for place in places):
            found[name] = candidate
    return tuple(found.values())


def _top_level_of(place: Path) -> Path:
    return place.parent.parent if place.name == "__init__.py" else place.parent


def _no_such(text: str) -> str:
    close = get_close_matches(text, BUILT_IN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no procedure named {text}; {hint}{_usage()}"


def _usage() -> str:
    return (
        f"TARGET is one of {', '.join(sorted(BUILT_IN))}, or a file: my/flow.py or my/flow.py:name"
    )
