"""Binds a worker process to its device and thread count before any kernel runs.

The thread count is part of what makes a result repeatable bit for bit, so it is always explicit:
`FUSION_THREADS` threads per operator, on the cores of `FUSION_CPUS` (as `0,2-3`). GPUs are chosen by
the environment that the driver libraries read (`CUDA_VISIBLE_DEVICES` and its like), set by whoever
starts the process.
"""

import os

import torch

from fusion_dask.errors import ClusterError

__all__ = ["default_device", "parse_cpus", "pin_process"]


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
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ClusterError(f"FUSION_CPUS={text!r} is not a list of cores such as 0,2-3") from None
    return frozenset(cores)


def pin_process() -> None:
    """Apply `FUSION_CPUS` and `FUSION_THREADS` to this process, where they are set."""
    cpus = os.environ.get("FUSION_CPUS")
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, parse_cpus(cpus))
    threads = os.environ.get("FUSION_THREADS")
    if threads:
        torch.set_num_threads(int(threads))


def default_device() -> torch.device:
    """The device that this process computes on: the first accelerator it can see, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
