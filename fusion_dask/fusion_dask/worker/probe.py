"""The probe: what this device does, measured.

Matrix products of a size that takes some milliseconds, for each dtype that the device computes in
reasonable time; a large copy; the memory that is free; copies between host and device; a file written,
flushed and read.

Other programs on a machine only slow a measurement down, and never speed it up: many short windows are
timed after a warm-up, and the rate is a high quantile of theirs, so that two probes of one idle device agree
although neither had the machine to itself. The warm-up is long enough for clocks to settle; a
device that throttles later is corrected by what real stages take (`Profile.efficiency`).

Covers: measuring, blocking, on the calling thread. Not covered: when (`probing.py`), links (`links.py`).

Invariant: the compute windows take `budget_s` in all, however slow the device.
"""

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]
import torch

from fusion_dask.worker.pace import Pace

__all__ = ["Disk", "Rates", "measure_disk", "measure_rates", "usable_memory"]

DTYPES: Final = ("float32", "bfloat16", "float16")
#: A dtype that is slower than fp32 by this is emulated by software and of no use.
USELESS: Final = 20.0
WINDOW_S: Final = 0.005
LARGEST: Final = 8192
WARM_UP: Final = 0.25
QUANTILE: Final = 0.8
COPY_BYTES: Final = 64 * 1024 * 1024
DISK_BYTES: Final = 64 * 1024 * 1024
#: Part of the free memory that is left to everything else.
RESERVE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device computes and moves; rates per second, as in `Profile`."""

    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    host_to_device_bytes_per_s: float | None
    device_to_host_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Bytes per second of the worker's folder."""

    write_bytes_per_s: float
    read_bytes_per_s: float


def measure_rates(device: torch.device, budget_s: float, pace: Pace) -> Rates:
    """Measure computing and moving on a device.

    Args:
        device: It must be this process's own.
        budget_s: Seconds for everything here.
        pace: Of an emulated device; what it slows down is measured slow.
    """
    share_s = budget_s / (len(DTYPES) + 1)
    flops_per_s: dict[str, float] = {}
    for name in DTYPES:
        rate = _matmul_rate(device, getattr(torch, name), share_s, pace, flops_per_s.get("float32"))
        if rate is not None:
            flops_per_s[name] = rate
    source = torch.ones(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = _best_rate(lambda: target.copy_(source), device, share_s / 2, pace)
    up = down = None
    if device.type != "cpu":
        host = torch.ones(COPY_BYTES // 4, dtype=torch.float32)
        host = host.pin_memory() if device.type == "cuda" else host
        up = COPY_BYTES * _best_rate(lambda: target.copy_(host), device, share_s / 4, pace)
        down = COPY_BYTES * _best_rate(lambda: host.copy_(source), device, share_s / 4, pace)
    return Rates(
        flops_per_s=flops_per_s,
        # A copy reads and writes.
        memory_bytes_per_s=2 * COPY_BYTES * copied,
        host_to_device_bytes_per_s=up,
        device_to_host_bytes_per_s=down,
    )


def usable_memory(device: torch.device, cap_bytes: int | None) -> int:
    """Bytes that a stage may fill: what is free now less a reserve, and at most the cap."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = int(psutil.virtual_memory().available)
    usable = int(free * (1 - RESERVE))
    return max(1, usable if cap_bytes is None else min(usable, cap_bytes))


def measure_disk(folder: Path) -> Disk | None:
    """Write, flush and read a file in `folder`; None where there is no room for it."""
    block = os.urandom(1024 * 1024)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="fusion-probe-") as file:
            begin = time.perf_counter()
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.perf_counter() - begin
            with contextlib.suppress(AttributeError):
                # Else it would be the page cache that is measured.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            with Path(file.name).open("rb", buffering=0) as again:
                while again.read(len(block)):
                    pass
            read_s = time.perf_counter() - begin
    except OSError:
        return None
    return Disk(write_bytes_per_s=DISK_BYTES / write_s, read_bytes_per_s=DISK_BYTES / read_s)


def _matmul_rate(
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
    pace: Pace,
    reference: float | None,
) -> float | None:
    """Sustained FLOP/s, or None where the dtype is missing or of no use."""
    size = 256
    while True:
        try:
            a = torch.ones(size, size, dtype=dtype, device=device)
            # The first product of a shape and dtype compiles or chooses its kernel.
            _ = a @ a
            once_s = _seconds(lambda a=a: a @ a, device, pace)  # type: ignore[misc]
        except (RuntimeError, TypeError):
            return None
        if once_s >= WINDOW_S or size >= LARGEST or once_s > budget_s / 16:
            break
        size *= 2
    if reference is not None and 2 * size**3 / once_s * USELESS < reference:
        return None
    return 2 * size**3 * _best_rate(lambda: a @ a, device, budget_s, pace)


def _best_rate(
    work: Callable[[], object], device: torch.device, budget_s: float, pace: Pace
) -> float:
    """How often per second `work` is done when nothing else disturbs it."""
    begin = time.perf_counter()
    repeats = max(1, math.ceil(WINDOW_S / _seconds(work, device, pace)))
    rates: list[float] = []
    while (spent := time.perf_counter() - begin) < budget_s or len(rates) < 2:

        def window() -> None:
            for _ in range(repeats):
                work()

        rate = repeats / _seconds(window, device, pace)
        if spent >= WARM_UP * budget_s:
            rates.append(rate)
    return statistics.quantiles(rates, n=100, method="inclusive")[int(100 * QUANTILE) - 1]


def _seconds(work: Callable[[], object], device: torch.device, pace: Pace) -> float:
    begin = time.perf_counter()
    with pace.work():
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
    return max(time.perf_counter() - begin, 1e-9)
