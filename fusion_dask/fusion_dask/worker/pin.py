"""Binds a worker process to its device, cores and thread count before any kernel runs.

The thread count is part of what makes a result repeatable bit for bit, so it is always explicit. GPUs are
chosen by the environment that the driver libraries read (`CUDA_VISIBLE_DEVICES` and its like), set by
whoever starts the process.

Invariant: what was asked for is what the process has, or it does not start.
"""

import logging
import os

import torch

from fusion_dask.errors import ClusterError
from fusion_dask.worker.settings import WorkerSettings

__all__ = ["default_device", "pin_process"]

logger = logging.getLogger(__name__)


def pin_process(settings: WorkerSettings) -> None:
    """Apply cores and threads to this process, where they are set.

    Raises:
        ClusterError: The machine does not have these cores, or does not give them.
    """
    if settings.cpus is not None and hasattr(os, "sched_setaffinity"):
        wanted = ",".join(map(str, sorted(settings.cpus)))
        for thread in _threads():
            try:
                os.sched_setaffinity(thread, settings.cpus)
                given = os.sched_getaffinity(thread)
            except ProcessLookupError:
                continue
            except OSError as error:
                raise ClusterError(f"FUSION_CPUS={wanted}: {error.strerror}") from None
            if given != settings.cpus:
                raise ClusterError(
                    f"FUSION_CPUS={wanted}: this machine gives only some of these cores"
                )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def default_device(asked: str | None = None) -> torch.device:
    """The device that this process computes on.

    Args:
        asked: `cpu` for the CPU; else the first accelerator that the process sees, or the CPU. A GPU
            that was asked for and is not seen is warned of: its driver or its build of torch is missing.
    """
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    if asked is not None:
        logger.warning(
            "torch %s does not see the device %s, so this worker computes on the CPU; install its driver "
            "and the build of torch for it",
            torch.__version__,
            asked,
        )
    return torch.device("cpu")


def _threads() -> list[int]:
    """Those of this process: each has an affinity of its own, and new ones take that of their creator."""
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except FileNotFoundError:
        return [0]
