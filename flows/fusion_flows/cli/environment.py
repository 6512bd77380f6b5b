"""The environment that the flow process and its children share.

Covers: settings, Prefect, Dask and offline switches; the share of cores and GPUs of a worker. Not
covered: applying it to a process.

Invariant: what the person has set in the environment stays, unless an argument says otherwise;
addresses of what we start ourselves are always ours.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusion_dask.config import as_environment

__all__ = ["Share", "shared", "shares", "visible_cores", "visible_gpus"]

# Nothing may wait for, or tell, the outside world.
OFFLINE: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker may use of this machine."""

    cores: tuple[int, ...]
    threads: int
    gpu: str | None

    def as_environment(self) -> dict[str, str]:
        """The variables that the worker applies to itself when it starts."""
        variables = {
            "FUSION_CPUS": ",".join(map(str, self.cores)),
            "FUSION_THREADS": str(self.threads),
        }
        if self.gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpu
        return variables


def shared(
    environ: Mapping[str, str],
    *,
    home: Path,
    store: str,
    cluster: str,
    prefect_url: str,
    verbose: bool,
) -> dict[str, str]:
    """All variables of the flow process and of every child."""
    fixed = {
        "FUSION_HOME": str(home),
        "FUSION_STORE": store,
        "FUSION_CLUSTER": cluster,
        "PREFECT_API_URL": prefect_url,
        # A task that finds no server must fail, not start one of its own.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        # A proxy of the environment is for the outside world only.
        "NO_PROXY": _with_loopback(environ.get("NO_PROXY") or environ.get("no_proxy") or ""),
    }
    fixed["no_proxy"] = fixed["NO_PROXY"]
    defaults = {
        **OFFLINE,
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
    }
    return {**as_environment(), **defaults, **environ, **fixed}


def shares(
    workers: int, *, cores: Sequence[int], gpus: Sequence[str], threads: int | None
) -> list[Share]:
    """Split a machine among workers: disjoint cores as long as there are enough, GPUs in turn.

    The number of threads is part of what makes a result repeatable bit for bit, so it is explicit.

    >>> [share.cores for share in shares(2, cores=[0, 1, 2, 3, 4], gpus=[], threads=None)]
    [(0, 1), (2, 3)]
    """
    each = max(1, len(cores) // workers)
    return [
        Share(
            cores=tuple(cores[(index * each + offset) % len(cores)] for offset in range(each)),
            threads=threads or each,
            gpu=gpus[index % len(gpus)] if gpus else None,
        )
        for index in range(workers)
    ]


def visible_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The NVIDIA and AMD GPUs that this process may use, found without loading a driver."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        return [] if "-1" in names else [name for name in names if name]
    nvidia = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    amd = [
        node
        for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
        if node.read_text().strip() not in {"", "0"}
    ]
    return [str(index) for index in range(len(nvidia) or len(amd))]


def _with_loopback(hosts: str) -> str:
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join(dict.fromkeys([*named, "127.0.0.1", "localhost"]))
