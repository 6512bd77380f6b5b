"""The workers that a run may use, as the broker knows them.

Covers: asking; waiting for workers that are being measured. Not covered: choosing among them
(`fusion_dask.planner`).

Invariant: a worker that is to leave is not among them. A scheduler without our broker has workers and no
profiles.
"""

import time
from typing import Any, Final

from distributed import Client

from fusion_dask.errors import ClusterError
from fusion_dask.planner.profile import Profile, profile_from_json

__all__ = ["ask", "profiles_of", "workers_of"]

POLL_S: Final = 0.5
#: Longest wait for workers that are being measured.
PROBE_WAIT_S: Final = 60.0


def workers_of(
    client: Client, *, backups: bool = True, wait_s: float = PROBE_WAIT_S
) -> dict[str, str]:
    """Name -> address of the workers that may take a stage, in the order in which they should.

    Args:
        client: A client of the cluster.
        backups: Whether those of the backup pool are among them, last. They are if there are no others.
        wait_s: Longest wait for measurements.

    Raises:
        ClusterError: There is none.
    """
    deadline = time.monotonic() + wait_s
    # A scheduler without the broker knows no such question, and answers None.
    while states := ask(client, "fusion_workers") or {}:
        if "probing" not in states.values() or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    info = client.scheduler_info(n_workers=-1)["workers"]
    names = {str(worker["name"]): address for address, worker in info.items()}
    usable = [name for name in names if states.get(name) not in {"draining", "left"}]
    if not usable:
        raise ClusterError(
            "the cluster has no worker that could take a stage; lend one with `fusion join`"
        )
    usable.sort(key=lambda name: (states.get(name) == "backup", len(name), name))
    active = [name for name in usable if states.get(name) != "backup"]
    chosen = usable if backups or not active else active
    return {name: names[name] for name in chosen}


def profiles_of(client: Client) -> dict[str, Profile]:
    """Worker name -> profile of the present members that were measured.

    Raises:
        ProfileError: The broker gave something that is no profile.
    """
    status = ask(client, "fusion_status")
    if status is None:
        return {}
    return {
        member["name"]: profile_from_json(member["profile"])
        for member in status["members"]
        if member["profile"] is not None and member["state"] != "left"
    }


def ask(client: Client, operation: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
    """Call one of the broker's handlers, or one of Dask's own."""
    return client.sync(getattr(client.scheduler, operation), **arguments)
