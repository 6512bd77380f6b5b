"""The environment that the flow process and its children share.

Covers: settings, Prefect, Dask and offline switches. Not covered: what a worker gets of the machine
(`fusion_dask.devices`).

Invariant: what the person has set in the environment stays, unless an argument says otherwise;
addresses of what we start ourselves are always ours.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fusion_dask.config import as_environment

__all__ = ["OFFLINE", "shared", "visible_cores"]

# Nothing may wait for, or tell, the outside world.
OFFLINE: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


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


def visible_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _with_loopback(hosts: str) -> str:
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join(dict.fromkeys([*named, "127.0.0.1", "localhost"]))
