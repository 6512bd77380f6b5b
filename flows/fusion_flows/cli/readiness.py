"""Waiting until the pieces of a cluster answer, before a flow runs.

Covers: the Prefect server's health, the scheduler and its workers. Not
covered: starting them (`cluster.py`).

Invariant: every wait has a deadline and ends at once when a child that is waited for has ended.
"""

import http.client
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from fusion_dask.errors import ClusterError
from fusion_flows.cli.cluster import Cluster
from fusion_flows.cli.errors import InputError, StartError
from fusion_flows.cli.group import Child
from fusion_flows.cli.scheduler import ask
from fusion_flows.cli.startup import Startup

__all__ = [
    "check_reach",
    "identity",
    "is_healthy",
    "probe_cluster",
    "probe_prefect",
    "wait_until_ready",
]

START_TIMEOUT_S: Final = 90.0
PROBE_TIMEOUT_S: Final = 3.0
POLL_S: Final = 0.05


def wait_until_ready(cluster: Cluster, startup: Startup) -> None:
    """Wait for everything that was started.

    Raises:
        StartError: A child ended, or is not ready in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    if cluster.scheduler is not None:
        needed = (cluster.scheduler, *cluster.workers)
        _wait(lambda: _has_workers(startup.cluster, len(startup.shares)), needed, deadline=deadline)
    if cluster.prefect is not None:
        _wait(lambda: is_healthy(startup.prefect_url), (cluster.prefect,), deadline=deadline)


def _has_workers(address: str, count: int) -> bool:
    answer = identity(address)
    return answer is not None and len(answer["workers"]) >= count


def _wait(ready: Callable[[], bool], needed: Sequence[Child], *, deadline: float) -> None:
    while not ready():
        for child in needed:
            if child.exit_code is not None:
                raise StartError(
                    f"the {child.name} did not start (exit code {child.exit_code}): "
                    f"{child.last_words()}"
                )
        if time.monotonic() > deadline:
            words = "; ".join(f"the {child.name} said: {child.last_words()}" for child in needed)
            raise StartError(f"not ready after {START_TIMEOUT_S:g} s; {words}")
        time.sleep(POLL_S)


def is_healthy(url: str, timeout_s: float = 1.0) -> bool:
    """Whether a Prefect API answers; never through a proxy."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        trusted = ssl.create_default_context(cafile=os.environ.get("PREFECT_API_SSL_CERT_FILE"))
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=timeout_s, context=trusted
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def identity(address: str, timeout_s: float = 1.0) -> dict[str, Any] | None:
    """What a scheduler says of itself, or None if none answers at that address."""
    try:
        answer: dict[str, Any] = ask(address, "identity", timeout_s=timeout_s)
    except ClusterError:
        return None
    return answer


def probe_cluster(address: str) -> dict[str, Any]:
    """Ask the scheduler of a running cluster.

    Raises:
        InputError: There is none at that address.
    """
    try:
        answer = identity(address, PROBE_TIMEOUT_S)
    except ValueError as error:
        raise InputError(
            f"--cluster {address}: {error}; an address looks like tcp://192.0.2.1:8786"
        ) from None
    if answer is None or answer.get("type") != "Scheduler":
        raise InputError(
            f"--cluster {address}: no Dask scheduler answers there; is it running and reachable "
            "from here? Leave the option away to start a cluster on this machine"
        )
    return answer


def check_reach(cluster: str, identity: Mapping[str, Any]) -> None:
    """Refuse workers of other machines if the Prefect server is to listen on the loopback.

    Raises:
        InputError: There are such workers.
    """
    here = {address.address for card in psutil.net_if_addrs().values() for address in card}
    hosts = {urlsplit(worker).hostname or "" for worker in identity["workers"]}
    if strangers := sorted(hosts - here):
        raise InputError(
            f"--cluster {cluster}: its workers on {', '.join(strangers)} cannot reach a Prefect "
            "server that is started here; set PREFECT_API_URL to one that they can reach"
        )


def probe_prefect(url: str) -> None:
    """Ask a Prefect server that somebody else runs.

    Raises:
        InputError: There is none at that address.
    """
    if not is_healthy(url, PROBE_TIMEOUT_S):
        raise InputError(
            f"PREFECT_API_URL={url}: no Prefect server answers there; start it, or unset the "
            "variable to let this command start one"
        )
