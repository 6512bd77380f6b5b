"""The worker side of the engine, and the preload that makes a Dask worker one of ours.

dask worker ADDRESS --nthreads 1 --no-nanny --preload fusion_dask.worker
"""

import threading

from distributed import Worker

from fusion_dask.worker.pin import pin_process
from fusion_dask.worker.plugin import FusionWorker
from fusion_dask.worker.warm import warm_up

__all__ = ["dask_setup"]


async def dask_setup(worker: Worker) -> None:
    """Called by Dask when the worker starts."""
    pin_process()
    # The first optimizer of a process takes 1 to 2 s of imports inside torch: not when a stage waits.
    threading.Thread(target=warm_up, name="fusion-warm-up", daemon=True).start()
    await worker.plugin_add(FusionWorker(), name=FusionWorker.name)
