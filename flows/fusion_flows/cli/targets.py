"""From a location to a Prefect flow.

Covers: loading a file as `python file.py` would, choosing its flow, and finding the modules of its
author beside it. Not covered: the flow's parameters (`parameters.py`).

Invariant: a target that cannot be run is an InputError that lists what there is.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from prefect import Flow

from fusion_flows.cli.errors import InputError
from fusion_flows.cli.location import Location

__all__ = ["Target", "resolve"]

# Every worker has these, also when a flow lies beside them.
OURS: Final = frozenset({"fusion_flows", "fusion_tasks", "fusion_dask", "fusion_storage"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A flow, and the modules of its author that no worker can import."""

    name: str
    flow: Flow[..., Any]
    own_modules: tuple[ModuleType, ...]


def resolve(location: Location) -> Target:
    """Load the flow at a location.

    Raises:
        InputError: There is no such flow, or the file does not load.
    """
    if location.path is None:
        assert location.module is not None
        assert location.flow_name is not None
        flow = getattr(import_module(location.module), location.flow_name)
        return Target(name=location.flow_name, flow=flow, own_modules=())
    module = _load(location.path)
    name, flow = _pick(module, location)
    return Target(name=name, flow=flow, own_modules=_siblings(module, location.path.parent))


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


def _pick(module: ModuleType, location: Location) -> tuple[str, Flow[..., Any]]:
    flows = {name: value for name, value in vars(module).items() if isinstance(value, Flow)}
    wanted, file_name = location.flow_name, location.text
    if wanted in flows:
        return wanted, flows[wanted]
    if not flows:
        raise InputError(f"{file_name} has no flow; decorate a function with @flow from prefect")
    listed = ", ".join(sorted(flows))
    if wanted is not None:
        raise InputError(f"{file_name} has no flow named {wanted}; its flows are: {listed}")
    # A flow that was imported to be called by the file's own one does not count.
    own = {n: flow for n, flow in flows.items() if flow.fn.__module__ == module.__name__}
    candidates = own or flows
    if len(candidates) > 1:
        raise InputError(f"{file_name} has several flows; pick one as {file_name}:NAME of {listed}")
    return next(iter(candidates.items()))


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
