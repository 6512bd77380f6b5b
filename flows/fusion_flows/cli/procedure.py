"""Running a person's flow in this process, with its tasks on Dask workers.

Covers: replacing thread-pool task runners, shipping the person's own modules by value, calling the
flow, and what of a traceback a person needs to see. Not covered: where the workers come from.

Invariant: a runner that the person chose on purpose is left alone.
"""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, cast

import cloudpickle  # type: ignore[import-untyped]
from prefect import Flow
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect_dask.task_runners import DaskTaskRunner

from fusion_flows.cli.targets import Target

__all__ = ["call", "excerpt", "use_dask"]

# Frames of these packages tell a person nothing about their own code.
MACHINERY: Final = frozenset(
    {"prefect", "prefect_dask", "distributed", "dask", "concurrent", "fusion_flows"}
)

# The file of every function that cloudpickle sent by value.
DYNAMIC: Final = "<dynamic-code>"


def use_dask(target: Target, address: str) -> None:
    """Let every flow of the target run its tasks on the cluster at `address`."""
    for module in target.own_modules:
        cloudpickle.register_pickle_by_value(module)
    for flow in _flows(target):
        # Not a subclass: that would be a choice of the person.
        if type(flow.task_runner) is ThreadPoolTaskRunner:
            # Its futures are a subtype of those that the attribute is declared with.
            flow.task_runner = cast("TaskRunner[Any]", DaskTaskRunner(address=address))


def call(flow: Flow[..., Any], arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Run the flow to its end, sync or async, and return its result."""
    result = flow(**arguments)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


def excerpt(error: BaseException, target: Target) -> str:
    """The traceback of an error without the frames of the machinery between the person's own."""
    report = traceback.TracebackException.from_exception(error)
    codes = [code for module in target.own_modules for code in _codes(module)]
    _prune(report, codes)
    return "".join(report.format()).rstrip()


async def _awaited(result: Any) -> Any:  # noqa: ANN401
    return await result


def _flows(target: Target) -> Iterator[Flow[..., Any]]:
    yield target.flow
    for module in target.own_modules:
        for value in list(vars(module).values()):
            if isinstance(value, Flow):
                yield value


def _prune(report: traceback.TracebackException | None, codes: Sequence[CodeType]) -> None:
    if report is None:
        return
    own = [_located(frame, codes) for frame in report.stack if not _is_machinery(frame)]
    if own:
        report.stack = traceback.StackSummary.from_list(own)
    _prune(report.__cause__, codes)
    _prune(report.__context__, codes)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """Every function of a module's file, compiled but not run."""
    path = Path(module.__file__ or "")
    waiting = [compile(path.read_bytes(), str(path), "exec")] if path.is_file() else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _located(frame: traceback.FrameSummary, codes: Sequence[CodeType]) -> traceback.FrameSummary:
    """Give a function that travelled by value its file back; cloudpickle drops the name of it."""
    if frame.filename != DYNAMIC:
        return frame
    for code in codes:
        if code.co_name == frame.name and frame.lineno in {line for *_, line in code.co_lines()}:
            return traceback.FrameSummary(code.co_filename, frame.lineno, frame.name)
    return frame


def _is_machinery(frame: traceback.FrameSummary) -> bool:
    return any(
        frame.filename.startswith(folder)
        for name in MACHINERY
        for folder in _folders(sys.modules.get(name))
    )


def _folders(module: ModuleType | None) -> list[str]:
    return [f"{folder}/" for folder in getattr(module, "__path__", [])]
