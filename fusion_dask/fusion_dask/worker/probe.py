"""The probe: what this device does, measured.

Matrix products of one fixed size, for each dtype that the device computes in reasonable time; a large
copy; the memory that is free; copies between host and device; a file written, flushed and read.

Other programs on a machine only slow a measurement down: many short windows are timed after a warm-up, and
the best one counts, so that two probes of one idle device agree although neither had the machine to itself.
(On two shared cores the best of a second's windows varied by 2 to 3 %, their median by up to 57 %.) A window
is long enough for the clock not to flatter it. The size is fixed since the rate depends on it: a size chosen by
a first, noisy product would make two probes differ by more than the noise. What a device cannot keep
up, because it gets warm, is corrected by what real stages take (`Profile.efficiency`).

Covers: measuring, blocking, on the calling thread. Not covered: when (`probing.py`), links (`links.py`).

Invariant: beyond a few windows for each dtype it takes no more than `budget_s`, however slow the device.
"""

import contextlib
import math
import os
import tempfile
import threading
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
#: Rows and columns of the matrices: 3 ms on a CPU core, 140 GFLOP for an accelerator.
CPU_SIZE: Final = 512
ACCELERATOR_SIZE: Final = 4096
WINDOW_S: Final = 0.01
FEWEST_WINDOWS: Final = 3
#: Part of the budget in which clocks and caches settle.
WARM_UP: Final = 0.25
#: Beyond most caches.
COPY_BYTES: Final = 128 * 1024 * 1024
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timer:
    """Times work on one device.

    Attributes:
        device: Its queue is emptied before a window ends.
        pace: Of an emulated device.
        ended: Set when nobody wants to know any more.
    """

    device: torch.device
    pace: Pace
    ended: threading.Event

    def best_rate(self, work: Callable[[], object], budget_s: float) -> float:
        """How often per second `work` is done when nothing else disturbs it."""
        begin = time.perf_counter()
        # Unpaced, so that every emulated device is given the same windows.
        repeats = max(1, math.ceil(WINDOW_S / self.seconds(work, 1, Pace())))
        best, windows = 0.0, 0
        while (spent := time.perf_counter() - begin) < budget_s or windows < FEWEST_WINDOWS:
            rate = repeats / self.seconds(work, repeats, self.pace)
            if spent >= WARM_UP * budget_s or self.ended.is_set():
                best, windows = max(best, rate), windows + 1
            if self.ended.is_set():
                break
        return best

    def seconds(self, work: Callable[[], object], repeats: int, pace: Pace) -> float:
        """Of `repeats` times `work`."""
        begin = time.perf_counter()
        with pace.work():
            for _ in range(repeats):
                work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            elif self.device.type == "mps":
                torch.mps.synchronize()
        return max(time.perf_counter() - begin, 1e-9)


def measure_rates(
    device: torch.device,
    *,
    budget_s: float,
    pace: Pace,
    room_bytes: int,
    ended: threading.Event | None = None,
) -> Rates:
    """Measure computing and moving on a device.

    Args:
        device: It must be this process's own.
        budget_s: Seconds for everything here.
        pace: Of an emulated device; what it slows down is measured slow.
        room_bytes: Memory that may be used.
        ended: Once it is set, this returns soon and what it returns means nothing.
    """
    timer = _Timer(device=device, pace=pace, ended=ended or threading.Event())
    share_s = budget_s / (len(DTYPES) + 1)
    flops_per_s: dict[str, float] = {}
    once_s: dict[str, float] = {}
    size = CPU_SIZE if device.type == "cpu" else ACCELERATOR_SIZE
    for name in DTYPES:
        product = _product(size, getattr(torch, name), device)
        if product is None:
            continue
        once_s[name] = timer.seconds(product, 1, Pace())
        if once_s[name] <= USELESS * once_s.get("float32", math.inf):
            flops_per_s[name] = 2 * size**3 * timer.best_rate(product, share_s)
    length = min(COPY_BYTES, room_bytes // 4) // 4
    source = torch.ones(length, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = timer.best_rate(lambda: target.copy_(source), share_s / 2)
    up = down = None
    if device.type != "cpu":
        # Not pinned: neither are the tensors that stages move.
        host = torch.ones(length, dtype=torch.float32)
        up = host.nbytes * timer.best_rate(lambda: target.copy_(host), share_s / 4)
        down = host.nbytes * timer.best_rate(lambda: host.copy_(source), share_s / 4)
    return Rates(
        flops_per_s=flops_per_s,
        # A copy reads and writes.
        memory_bytes_per_s=2 * source.nbytes * copied,
        host_to_device_bytes_per_s=up,
        device_to_host_bytes_per_s=down,
    )


def usable_memory(device: torch.device, *, cap_bytes: int | None, sharers: int) -> int:
    """Bytes that a stage may fill.

    Args:
        device: It must be this process's own.
        cap_bytes: At most these; None for no cap.
        sharers: Workers that compute on this device; each may fill its part.

    Returns:
        What is free now, less a reserve.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = int(psutil.virtual_memory().available)
    usable = int(free * (1 - RESERVE)) // sharers
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


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object] | None:
    """A matrix product whose kernel is chosen and loaded, or None where the device has no such dtype."""
    generator = torch.Generator().manual_seed(0)
    try:
        a, b = (
            torch.rand(size, size, generator=generator).to(device=device, dtype=dtype)
            for _ in range(2)
        )
        _ = a @ b
    except (RuntimeError, TypeError):
        return None
    return lambda: a @ b
