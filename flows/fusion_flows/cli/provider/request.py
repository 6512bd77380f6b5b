"""The options of `fusion join`, checked: what will be lent, to whom, and when.

Covers: reading options, before anything is started or said to anybody. Not covered: enrolment
(`fusion_dask.security.enrol`), running workers (`lend.py`).
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil  # type: ignore[import-untyped]

from fusion_dask.devices.emulation import emulations, parse_shape
from fusion_dask.devices.find import cpu_device, find_gpus
from fusion_dask.devices.share import Share, choose, emulate, share_out
from fusion_flows.cli import environment
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.provider.window import Window, parse_window

__all__ = ["JoinRequest", "bytes_of", "default_name", "shares_of", "window_of"]

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,59}")
LEAST_BYTES: Final = 10**6
UNITS: Final = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """The options as they were typed; the token is not among them."""

    address: str
    name: str | None = None
    devices: str | None = None
    emulate: str | None = None
    link: str | None = None
    memory: str | None = None
    lend: str | None = None
    backup: bool = False

    def __post_init__(self) -> None:
        """Refuse a name that is none."""
        if self.name is not None and not NAME.fullmatch(self.name):
            raise InputError(
                f"--name {self.name}: take 1 to 60 letters, digits, dots, dashes and underscores"
            )


def shares_of(request: JoinRequest) -> Sequence[Share]:
    """The workers to run.

    Raises:
        InputError: Options exclude each other, or a size is none.
        DeviceError: There is no such device.
    """
    cpu, cores = cpu_device(), environment.visible_cores()
    if request.emulate is None:
        if request.link is not None:
            raise InputError("--link shapes the links of emulated devices; give --emulate too")
        memory = None if request.memory is None else bytes_of(request.memory)
        devices = choose(request.devices or "all", find_gpus(), cpu)
        return share_out(devices, cores=cores, memory_bytes=memory)
    if request.devices is not None:
        raise InputError(
            "--devices and --emulate exclude each other: emulated devices are CPU workers"
        )
    free = int(psutil.virtual_memory().available)
    made = emulations(
        request.emulate,
        cores=len(cores),
        available_bytes=free if request.memory is None else min(free, bytes_of(request.memory)),
        link=None if request.link is None else parse_shape(request.link),
    )
    return emulate(made, cpu, cores=cores)


def window_of(request: JoinRequest) -> Window | None:
    """The hours to lend; None for all day."""
    return None if request.lend is None else parse_window(request.lend)


def default_name() -> str:
    """That of this machine, as far as it can be a name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip(".")[:60] or "provider"


def bytes_of(text: str) -> int:
    """A size.

    >>> bytes_of("8GB"), bytes_of("1.5 GiB")
    (8000000000, 1610612736)

    Raises:
        InputError: It is none, or too small for anything.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--memory {text}: a size looks like 8GB or 7.5GiB")
    size = int(float(match[1]) * UNITS[match[2] or ""])
    if size < LEAST_BYTES:
        raise InputError(f"--memory {text}: no stage fits into that; was it meant as {match[1]}GB?")
    return size
