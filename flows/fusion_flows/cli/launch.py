"""Carry out a startup: load and check the flow, start what is missing, run the flow, report.

Covers: the order, and what a person sees. Not covered: how each of these is done. Imports Prefect
and Dask, so the environment has to be in place.

Invariant: no process is started before the flow, its parameters and running servers were checked.
"""

import atexit
import sys
import time
from typing import Any

from rich.console import Console

from fusion_dask.errors import FusionError
from fusion_flows.cli import cluster, parameters, procedure, readiness, runlog, targets
from fusion_flows.cli.errors import ChildLost, InputError
from fusion_flows.cli.group import ProcessGroup
from fusion_flows.cli.location import Location
from fusion_flows.cli.monitor import Monitor
from fusion_flows.cli.signals import Interrupted
from fusion_flows.cli.startup import Request, Startup
from fusion_flows.cli.targets import Target
from fusion_storage.errors import StorageError

__all__ = ["launch"]


def launch(request: Request, location: Location, startup: Startup) -> int:
    """Run the flow of a request.

    Returns:
        The exit code of the command: 1 if the flow failed.

    Raises:
        CliError: Something else is wrong than the flow.
    """
    console = Console(stderr=True)
    runlog.install()
    target = targets.resolve(location)
    arguments = _arguments(target, request)
    if startup.scheduler_port is None:
        found = readiness.probe_cluster(startup.cluster)
        if startup.prefect_port is not None:
            readiness.check_reach(startup.cluster, found)
    if startup.prefect_port is None:
        readiness.probe_prefect(startup.prefect_url)
    children = _start(startup, console)
    procedure.use_dask(target, startup.cluster)
    began = time.monotonic()
    try:
        with Monitor(children.lost):
            procedure.call(target.flow, arguments)
    except (Interrupted, Exception) as error:
        if (reason := children.lost()) is not None:
            raise ChildLost(reason) from error
        if isinstance(error, Interrupted):
            raise
        _report(console, target, error)
        return 1
    console.print(f"{target.name} finished in {time.monotonic() - began:.1f} s", style="green")
    return 0


def _arguments(target: Target, request: Request) -> dict[str, Any]:
    chosen = list(request.settings)
    if request.resume is not None:
        if "resume" not in parameters.slots(target.flow.fn):
            raise InputError(f"--resume: {target.name} has no parameter named resume")
        chosen.append(f"resume={request.resume}")
    return parameters.arguments(target.flow.fn, chosen)


def _start(startup: Startup, console: Console) -> cluster.Cluster:
    if startup.scheduler_port is None and startup.prefect_port is None:
        return cluster.Cluster(scheduler=None, workers=(), prefect=None)
    group = ProcessGroup()
    # At exit, not on leaving a block: Prefect hands its last events to the server before that.
    atexit.register(group.stop)
    what = [f"{len(startup.shares)} workers"] if startup.shares else []
    what += ["a Prefect server"] if startup.prefect_port is not None else []
    with console.status(f"starting {' and '.join(what)}"):
        started = cluster.start(group, startup)
        readiness.wait_until_ready(started, startup)
    if startup.prefect_port is not None:
        console.print(f"Prefect UI while this runs: {startup.prefect_url.removesuffix('/api')}")
    return started


def _report(console: Console, target: Target, error: Exception) -> None:
    message = " ".join(str(error).split())
    if not isinstance(error, FusionError | StorageError):
        print(procedure.excerpt(error, target), file=sys.stderr)  # noqa: T201
        message = f"{target.name} failed with {type(error).__name__}: {message}"
    console.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
