"""The worker side of the engine, and the preload that makes a Dask worker one of ours.

dask worker ADDRESS --nthreads 1 --no-nanny --preload fusion_dask.worker
"""

import asyncio
import sys
import threading

from distributed import Worker

from fusion_dask.errors import FusionError
from fusion_dask.security.guard import guard, worker_allows
from fusion_dask.worker.memory import cap_memory
from fusion_dask.worker.pin import default_device, pin_process
from fusion_dask.worker.plugin import FusionWorker
from fusion_dask.worker.probing import Probing
from fusion_dask.worker.settings import WorkerSettings
from fusion_dask.worker.warm import warm_up

__all__ = ["dask_setup"]


async def dask_setup(worker: Worker) -> None:
    """Called by Dask when the worker starts, before it joins."""
    try:
        await _onboard(worker)
    except FusionError as error:
        # Dask would log the failure of a preload, and start the worker all the same.
        sys.exit(f"error: {error}")


async def _onboard(worker: Worker) -> None:
    settings = WorkerSettings.from_environ()
    pin_process(settings)
    # The first optimizer of a process takes 1 to 2 s of imports inside torch: not when a stage waits.
    warming = threading.Thread(target=warm_up, name="fusion-warm-up", daemon=True)
    warming.start()
    plugin = FusionWorker(settings.emulation, default_device(settings.device))
    await worker.plugin_add(plugin, name=FusionWorker.name)
    guard(worker, worker_allows)
    if settings.emulation is not None:
        # What torch itself needs is not the device's.
        await asyncio.to_thread(warming.join)
        cap_memory(settings.emulation.memory_bytes)
    probing = Probing(worker, plugin, settings)
    if await probing.say_hello() and settings.probe_s > 0:
        probing.start()
        plugin.on_teardown = probing.close
