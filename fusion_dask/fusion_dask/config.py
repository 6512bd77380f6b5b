"""The Dask configuration that a Fusion cluster runs with.

Covers: one table, for `dask.config.set` in this process and as environment variables for child
processes. Not covered: ports, addresses and thread counts, which belong to each process.

Invariant: the values are plain literals, so that both forms mean the same.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["DASK_CONFIG", "as_environment"]

DASK_CONFIG: Final[Mapping[str, bool | int | str]] = MappingProxyType(
    {
        # Stages are pinned and hold state; free tasks are placed by the broker, not by stealing.
        "distributed.scheduler.work-stealing": False,
        # Counts every task assigned to a dead worker, also the innocent ones: we count ourselves.
        "distributed.scheduler.allowed-failures": 1000,
        "distributed.scheduler.worker-ttl": "60s",
        "distributed.scheduler.active-memory-manager.start": False,
        "distributed.worker.profile.enabled": False,
        # Resident parameters look like a leak to Dask's memory monitor.
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        "distributed.comm.compression": False,
        # The default of 30 s stalls whoever still holds the address of a dead peer.
        "distributed.comm.timeouts.connect": "2s",
        # The lowest that distributed accepts: a cut line is noticed after 11 s instead of 29 s.
        "distributed.comm.timeouts.tcp": "11s",
        "distributed.admin.tick.interval": "1s",
        "distributed.admin.system-monitor.gil.enabled": False,
    }
)


def as_environment(config: Mapping[str, bool | int | str] = DASK_CONFIG) -> dict[str, str]:
    """Spell a configuration as the environment variables that Dask reads at import.

    >>> as_environment({"distributed.worker.memory.target": False})
    {'DASK_DISTRIBUTED__WORKER__MEMORY__TARGET': 'False'}
    """
    return {
        "DASK_" + key.upper().replace(".", "__").replace("-", "_"): str(value)
        for key, value in config.items()
    }
