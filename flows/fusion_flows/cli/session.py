"""One `fusion run` from its options to its exit code.

Covers: what has to happen before Prefect and Dask are imported, since they read the environment
then, and how an interrupted run ends. Not covered: the run itself (`launch.py`).

Invariant: what can be checked without the slow imports is checked before them.
"""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fusion_dask.devices.find import cpu_device, find_gpus
from fusion_flows.cli import environment, ports, signals, store
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.location import locate
from fusion_flows.cli.membership import as_member, choose_pool, read_token
from fusion_flows.cli.startup import Machine, Request, decide, wants_embedded
from fusion_tasks import settings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["execute"]


def execute(request: Request) -> int:
    """Check, start, run, report.

    Returns:
        The exit code of the command.

    Raises:
        CliError: For the caller to print.
    """
    signals.install()
    try:
        code = _execute(request)
    except signals.Interrupted as stop:
        code = stop.exit_code
        print(f"error: interrupted before {request.target} was done", file=sys.stderr)  # noqa: T201
    # Prefect hands its last events to the server while the interpreter ends: not for ever.
    signals.leave_within_grace(code)
    return code


def _execute(request: Request) -> int:
    location = locate(request.target)
    machine = Machine(
        cores=environment.visible_cores(),
        cpu=cpu_device(),
        gpus=find_gpus(),
        free_ports=ports.choose(2),
    )
    environ: Mapping[str, str] = os.environ
    home = settings.current().home
    pool = None
    if request.cluster is not None or not wants_embedded(request):
        token = read_token(request.token, sys.stdin)
        pool = choose_pool(home, cluster=request.cluster, token=token)
    if pool is not None:
        print(f"on the pool at {pool.address}", file=sys.stderr)  # noqa: T201
        environ, request = as_member(pool), replace(request, cluster=None)
    startup = decide(request, environ, machine)
    asked = {"--prefect-port": request.prefect_port, "--dashboard-port": request.dashboard_port}
    ports.check_free({option: port for option, port in asked.items() if port is not None})
    if request.dashboard_port is not None and find_spec("bokeh") is None:
        raise InputError("--dashboard-port: Dask's dashboard needs bokeh; pip install bokeh")
    store.check_writable(startup.environment["FUSION_STORE"])
    _make_home(startup.prefect_home)
    os.environ.update(startup.environment)
    from fusion_flows.cli.launch import launch

    return launch(request, location, startup)


def _make_home(folder: Path) -> None:
    """Make what outlives a run; Prefect only warns and then fails in strange ways."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made ({error.strerror}); set FUSION_HOME to a folder of yours"
        ) from None
