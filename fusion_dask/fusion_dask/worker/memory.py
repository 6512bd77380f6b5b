"""The memory cap of an emulated device, kept by the system.

`RLIMIT_DATA` counts the private memory that a process may write: an allocation beyond fails in this
process, as it would on a device that is full. Linux only.

Covers: setting the cap, and telling an allocation that failed from other errors. Not covered: capping
real devices, whose drivers know what is full.
"""

import resource
import sys
from pathlib import Path
from typing import Final

import torch

__all__ = ["cap_memory", "is_out_of_memory"]

#: The stacks of threads that the process starts later.
OVERHEAD_BYTES: Final = 64 * 1024 * 1024


def cap_memory(size: int) -> bool:
    """Allow `size` bytes on top of what this process has now; False where that cannot be done."""
    if sys.platform != "linux":
        return False
    used = _data_bytes(Path("/proc/self/status").read_text())
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + size + OVERHEAD_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of Python, of torch on the CPU or of torch on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no type of its own for host memory.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _data_bytes(status: str) -> int:
    r"""`VmData` of a process.

    >>> _data_bytes("VmPeak: 9 kB\nVmData:\t 12 kB")
    12288
    """
    line = next(line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
