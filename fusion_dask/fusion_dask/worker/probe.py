"""The probe: what this device does, measured.

Matrix products of one fixed size, for each dtype that the device computes in reasonable time; a large
copy; the memory that is free; copies between host and device; a file written, flushed and read.

Other programs on a machine only slow a measurement down: many short windows are timed after a warm-up, and
the best one counts, so that two probes of one idle device agree although neither had the machine to itself.
(On two cores with a load of 5, the best of 6 s differed by at most 7 % between two probes, medians of a second by
up to 57 %.) A window is long enough for the clock not to flatter it. The size is fixed since the rate depends on
it: a size chosen by a first, noisy product would make two probes differ by more than the noise. What a device
cannot keep up, because it gets warm, is corrected by what real stages take (`Profile.efficiency`).

Covers: measuring, blocking, on the calling thread. Not covered: when (`probing.py`), links (`links.py`).

Invariant: beyond `PATIENCE` times `budget_s` computing takes one more round of windows at most, and beyond
`DISK_S` each way the disk one more chunk, however slow they are.
"""

import contextlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
FEWEST_ROUNDS: Final = 3
#: How far beyond its budget a slow device may go for these rounds.
PATIENCE: Final = 2.0
#: Part of the budget in which clocks settle: what is sustained counts, not the boost of a cold device.
WARM_UP: Final = 0.25
#: Beyond most caches.
COPY_BYTES: Final = 128 * 1024 * 1024
DISK_BYTES: Final = 64 * 1024 * 1024
#: Flushed at once: enough for a disk to be at its rate, and soon done on a slow one.
DISK_CHUNK_BYTES: Final = 16 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
DISK_S: Final = 2.0
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

    def best_rates(
        self, works: Mapping[str, Callable[[], object]], budget_s: float
    ) -> dict[str, float]:
        """How often per second each work is done when nothing else disturbs it.

        In turns, so that a disturbance of a second or two spoils some windows of each and all of none.
        """
        # Unpaced, so that every emulated device is given the same windows.
        repeats = {
            name: max(1, math.ceil(WINDOW_S / self.seconds(work, 1, Pace())))
            for name, work in works.items()
        }
        begin, spent = time.perf_counter(), 0.0
        best, rounds = dict.fromkeys(works, 0.0), 0
        while spent < budget_s or (rounds < FEWEST_ROUNDS and spent < PATIENCE * budget_s):
            is_warm = spent >= WARM_UP * budget_s
            rates = {
                name: repeats[name] / self.seconds(work, repeats[name], self.pace)
                for name, work in works.items()
            }
            spent = time.perf_counter() - begin
            # The first round counts where there is no time for another.
            if is_warm or spent >= budget_s or self.ended.is_set():
                best, rounds = {name: max(best[name], rates[name]) for name in works}, rounds + 1
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
    size = CPU_SIZE if device.type == "cpu" else ACCELERATOR_SIZE
    works: dict[str, Callable[[], object]] = dict(_products(size, device, timer))
    length = min(COPY_BYTES, room_bytes // 4) // 4
    source = torch.ones(length, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    works["copy"] = lambda: target.copy_(source)
    if device.type != "cpu":
        # Not pinned: neither are the tensors that stages move.
        host = torch.ones(length, dtype=torch.float32)
        works["up"] = lambda: target.copy_(host)
        works["down"] = lambda: host.copy_(source)
    rates = timer.best_rates(works, budget_s)
    moved = {name: source.nbytes * rates[name] for name in ("copy", "up", "down") if name in rates}
    return Rates(
        flops_per_s={name: 2 * size**3 * rates[name] for name in DTYPES if name in rates},
        # A copy reads and writes.
        memory_bytes_per_s=2 * moved["copy"],
        host_to_device_bytes_per_s=moved.get("up"),
        device_to_host_bytes_per_s=moved.get("down"),
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
    chunk = os.urandom(DISK_CHUNK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="fusion-probe-", buffering=0) as file:

            def write() -> int:
                written = file.write(chunk)
                os.fsync(file.fileno())
                return written

            write_bytes_per_s = _disk_rate(write)
            with contextlib.suppress(AttributeError):
                # Else it would be the page cache that is measured.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with Path(file.name).open("rb", buffering=0) as again:
                read_bytes_per_s = _disk_rate(lambda: len(again.read(READ_BYTES)))
    except OSError:
        return None
    return Disk(write_bytes_per_s=write_bytes_per_s, read_bytes_per_s=read_bytes_per_s)


def _disk_rate(move: Callable[[], int]) -> float:
    """Bytes per second of moving `DISK_BYTES`, or what `DISK_S` are enough for."""
    begin, moved, spent = time.perf_counter(), 0, 0.0
    while moved < DISK_BYTES and spent < DISK_S and (count := move()):
        moved += count
        spent = time.perf_counter() - begin
    return moved / max(spent, 1e-9)


def _products(
    size: int, device: torch.device, timer: _Timer
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Matrix products by dtype, of those that are of use on the device."""
    longest_s = math.inf
    for name in DTYPES:
        product = _product(size, getattr(torch, name), device)
        if product is None:
            continue
        once_s = timer.seconds(product, 1, Pace())
        if once_s <= longest_s:
            yield name, product
        if name == "float32":
            longest_s = USELESS * once_s


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
