"""The embedded cluster: a Dask scheduler, Dask workers and a Prefect server on the loopback.

Covers: the commands of these processes and starting them. Not covered: waiting for them and
noticing when one is lost (`readiness.py`), how they end (`group.py`), which environment they
share (`environment.py`).

The scheduler is a process of its own: a flow that holds the GIL for seconds, as capturing a model
does, would otherwise silence it, and the workers would be taken for lost. It costs no time, since
the Prefect server takes longer to start than scheduler and workers together. Dask's `SpecCluster`
is not used: it ends its processes from an event loop of this process, which SIGKILL takes away.

Invariant: starting does not wait; everything starts at once.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusion_dask.devices.share import Share
from fusion_flows.cli import prefect_home
from fusion_flows.cli.group import Child, ProcessGroup
from fusion_flows.cli.ports import LOOPBACK
from fusion_flows.cli.startup import Startup

__all__ = ["PYTHON", "WORKER", "Cluster", "start"]

# -P: neither the current folder nor that of a script may shadow what a child imports.
PYTHON: Final = (sys.executable, "-P", "-m")
# A worker whose scheduler never comes up ends by itself after this time.
DEATH_TIMEOUT_S: Final = 120
#: Options of every worker: one task thread, and nothing that listens but its comm.
WORKER: Final = (
    *("--nthreads", "1", "--no-nanny", "--memory-limit", "0"),
    *("--no-dashboard", "--dashboard-address", f"{LOOPBACK}:0"),
    *("--preload", "fusion_dask.worker", "--preload", "fusion_flows.cli.runlog"),
)
# What only deployments, work pools and automations need; a run that is started here has none.
SERVICES_OFF: Final = {
    f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false"
    for service in ("FOREMAN", "LATE_RUNS", "SCHEDULER", "TRIGGERS")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The children that a run depends on; what runs elsewhere is not among them."""

    scheduler: Child | None
    workers: tuple[Child, ...]
    prefect: Child | None

    def lost(self) -> str | None:
        """What is gone that a flow cannot go on without, in one line."""
        for child in (self.scheduler, self.prefect):
            if child is not None and child.exit_code is not None:
                return f"the {child.name} ended (exit code {child.exit_code}): {child.last_words()}"
        if self.workers and all(child.exit_code is not None for child in self.workers):
            return f"no worker is left; the last one said: {self.workers[-1].last_words()}"
        return None


def start(group: ProcessGroup, startup: Startup) -> Cluster:
    """Start all that the startup wants, at once, the slowest first."""
    prefect = scheduler = None
    workers: list[Child] = []
    if startup.prefect_port is not None:
        prefect = _start_prefect(group, startup.prefect_port, startup.environment)
    if startup.scheduler_port is not None:
        scheduler = _start_scheduler(
            group,
            startup.scheduler_port,
            startup.environment,
            dashboard_port=startup.dashboard_port,
        )
        workers = _start_workers(group, startup.cluster, startup.environment, startup.shares)
    return Cluster(scheduler=scheduler, workers=tuple(workers), prefect=prefect)


def _start_scheduler(
    group: ProcessGroup, port: int, environment: Mapping[str, str], *, dashboard_port: int | None
) -> Child:
    """Start the scheduler with the broker in it."""
    # Without the address its web server would listen on every one.
    dashboard = ["--dashboard-address", f"{LOOPBACK}:{dashboard_port or 0}"]
    dashboard += [] if dashboard_port else ["--no-dashboard"]
    command = [*PYTHON, "distributed.cli.dask_scheduler", "--host", LOOPBACK, "--port", str(port)]
    return group.start(
        "scheduler",
        # Prefect too: the first task graph that arrives names it, and the import takes seconds.
        [*command, *dashboard, "--preload", "fusion_dask.broker", "--preload", "prefect_dask"],
        environment=environment,
    )


def _start_workers(
    group: ProcessGroup, address: str, environment: Mapping[str, str], shares: Sequence[Share]
) -> list[Child]:
    """Start one worker for each share of the machine."""
    fixed = [*WORKER, "--host", LOOPBACK, "--local-directory", str(group.folder)]
    fixed += ["--death-timeout", str(DEATH_TIMEOUT_S)]
    return [
        group.start(
            f"w{index}",
            [*PYTHON, "distributed.cli.dask_worker", address, "--name", f"w{index}", *fixed],
            environment={
                **environment,
                **share.as_environment(),
                "PYTHONUNBUFFERED": "1",
                "FUSION_PROBE_S": "0",
            },
            # What a task of the person prints is for the person.
            shares_stdout=True,
        )
        for index, share in enumerate(shares)
    ]


def _start_prefect(group: ProcessGroup, port: int, environment: Mapping[str, str]) -> Child:
    """Start the Prefect server."""
    claimed = prefect_home.claim(Path(environment["PREFECT_HOME"]), scratch=group.folder)
    server = {
        **SERVICES_OFF,
        **environment,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{claimed.database}",
    }
    child = group.start(
        "Prefect server",
        [*PYTHON, "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)],
        environment=server,
        ask_to_end=True,
        inherit_fds=[] if claimed.lock is None else [claimed.lock],
    )
    if claimed.lock is not None:
        os.close(claimed.lock)
    return child
