"""What a `fusion run` will start and which environment it will have.

Covers: reading options and environment into one record. Not covered: carrying it out
(`session.py`).

Invariant: an argument beats the environment, which beats the default; two arguments that exclude
each other are an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fusion_dask.devices.find import Device
from fusion_dask.devices.share import Share, share_out
from fusion_flows.cli import environment
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.ports import LOOPBACK
from fusion_tasks import settings

__all__ = ["Machine", "Request", "Startup", "decide", "wants_embedded"]

DEFAULT_WORKERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of `fusion run`."""

    target: str
    settings: tuple[str, ...] = ()
    workers: int | None = None
    cluster: str | None = None
    token: str | None = field(default=None, repr=False)
    local: bool = False
    store: str | None = None
    resume: str | None = None
    prefect_port: int | None = None
    dashboard_port: int | None = None
    threads_per_worker: int | None = None
    verbose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine offers: cores, its CPU and GPUs, and two free ports."""

    cores: Sequence[int]
    cpu: Device
    gpus: Sequence[Device]
    free_ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """What to start, and what it shares.

    Attributes:
        cluster: Address of the scheduler.
        scheduler_port: Where to start one, or None if `cluster` runs already.
        dashboard_port: Where to start its dashboard.
        shares: One for each worker to start.
        prefect_url: Address of the Prefect API.
        prefect_port: Where to start it, or None if it runs already.
        environment: All variables of this process and its children.
    """

    cluster: str
    scheduler_port: int | None
    dashboard_port: int | None
    shares: tuple[Share, ...]
    prefect_url: str
    prefect_port: int | None
    environment: Mapping[str, str]

    @property
    def prefect_home(self) -> Path:
        """Where Prefect keeps its files."""
        return Path(self.environment["PREFECT_HOME"])


def wants_embedded(request: Request) -> bool:
    """Whether an option says that the cluster is to be started here."""
    options = (request.workers, request.threads_per_worker, request.dashboard_port)
    return request.local or any(option is not None for option in options)


def decide(request: Request, environ: Mapping[str, str], machine: Machine) -> Startup:
    """Turn options into a startup.

    Raises:
        InputError: Options contradict each other.
    """
    embedded_only = {
        "--workers": request.workers,
        "--threads-per-worker": request.threads_per_worker,
        "--dashboard-port": request.dashboard_port,
    }
    given = [option for option, value in embedded_only.items() if value is not None]
    given += ["--local"] if request.local else []
    if request.cluster and given:
        raise InputError(
            f"{given[0]} is for a cluster that this command starts; leave it or --cluster away"
        )
    scheduler_port, free_port = machine.free_ports
    known = settings.current(environ)
    running = request.cluster or (None if given else known.cluster)
    address = running or f"tcp://{LOOPBACK}:{scheduler_port}"
    url, prefect_port = _prefect(request, environ, free_port)
    workers = request.workers or len(machine.gpus) or DEFAULT_WORKERS
    # A GPU has one worker; those beyond the GPUs compute on the CPU.
    devices = [*machine.gpus, *[machine.cpu] * workers][:workers]
    shares = share_out(devices, cores=machine.cores, threads=request.threads_per_worker)
    return Startup(
        cluster=address,
        scheduler_port=None if running else scheduler_port,
        dashboard_port=request.dashboard_port,
        shares=() if running else tuple(shares),
        prefect_url=url,
        prefect_port=prefect_port,
        environment=environment.shared(
            environ,
            home=known.home,
            store=request.store or known.store,
            cluster=address,
            prefect_url=url,
            verbose=request.verbose,
        ),
    )


def _prefect(
    request: Request, environ: Mapping[str, str], free_port: int
) -> tuple[str, int | None]:
    url = environ.get("PREFECT_API_URL")
    if url and request.prefect_port is None:
        return url, None
    port = request.prefect_port or free_port
    return f"http://{LOOPBACK}:{port}/api", port
