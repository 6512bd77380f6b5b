"""What a worker is told by its environment.

    FUSION_PROVIDER      name of the machine; its host name by default
    FUSION_DEVICE        identity of the device that it is pinned to
    FUSION_CPUS          cores, as 0,2-3; FUSION_THREADS threads of a kernel
    FUSION_MEMORY_BYTES  what a stage may fill
    FUSION_SHARERS       workers that compute on this device; 1 by default
    FUSION_BACKUP        1: for the backup pool
    FUSION_EMULATE       JSON of an `Emulation`
    FUSION_PROBE_S       seconds of measuring; 0 for none

Invariant: a bad value is an error that names the variable.
"""

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fusion_dask.devices.emulation import Emulation
from fusion_dask.errors import ClusterError

__all__ = ["WorkerSettings", "parse_cpus"]

PROBE_S: Final = 6.0
LONGEST_PROBE_S: Final = 12.0
#: More than Linux counts.
MOST_CORES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of one worker process.

    Attributes:
        memory_bytes: What a stage may fill: no more than was said, and than the emulated device has.
    """

    provider: str
    device: str | None
    cpus: frozenset[int] | None
    threads: int | None
    memory_bytes: int | None
    sharers: int
    backup: bool
    emulation: Emulation | None
    probe_s: float

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "WorkerSettings":
        """Read them; an empty variable counts as unset.

        Raises:
            ClusterError: A value is none.
            DeviceError: `FUSION_EMULATE` is malformed.
        """
        emulate, cpus = environ.get("FUSION_EMULATE"), environ.get("FUSION_CPUS")
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip(".")
        probe_s = _number(environ, "FUSION_PROBE_S", PROBE_S)
        emulation = Emulation.from_json(emulate) if emulate else None
        caps = [_count(environ, "FUSION_MEMORY_BYTES"), emulation and emulation.memory_bytes]
        return cls(
            provider=environ.get("FUSION_PROVIDER") or host or "provider",
            device=environ.get("FUSION_DEVICE") or None,
            cpus=parse_cpus(cpus) if cpus else None,
            threads=_count(environ, "FUSION_THREADS"),
            memory_bytes=min((cap for cap in caps if cap), default=None),
            sharers=_count(environ, "FUSION_SHARERS") or 1,
            backup=environ.get("FUSION_BACKUP") == "1",
            emulation=emulation,
            probe_s=min(probe_s, LONGEST_PROBE_S),
        )


def parse_cpus(text: str) -> frozenset[int]:
    """Core numbers of a list such as `0,2-3`.

    >>> sorted(parse_cpus("0,2-3"))
    [0, 2, 3]

    Raises:
        ClusterError: The text is not such a list.
    """
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            # No machine has more; a slip of the pen is not to fill the memory.
            cores.update(range(int(first), min(int(last or first), MOST_CORES) + 1))
    except ValueError:
        cores = set()
    if not cores:
        raise ClusterError(f"FUSION_CPUS={text!r} is not a list of cores such as 0,2-3")
    return frozenset(cores)


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ClusterError(f"{name}={text!r} is not a whole number above 0")
    return int(text)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ClusterError(f"{name}={text!r} is not a number of seconds")
    return value
