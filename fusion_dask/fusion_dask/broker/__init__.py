"""The broker: the scheduler side of the engine, and the preload that installs it.

dask scheduler --preload fusion_dask.broker

With `FUSION_BROKER_STATE`, a folder of `fusion up`, profiles are kept over a restart and members whose
token was revoked are sent away.
"""

import os
from pathlib import Path

from distributed import Scheduler

from fusion_dask.broker.plugin import Broker

__all__ = ["Broker", "dask_setup"]


def dask_setup(scheduler: Scheduler) -> None:
    """Called by Dask when the scheduler starts."""
    state = os.environ.get("FUSION_BROKER_STATE")
    if state is None:
        scheduler.add_plugin(Broker(), name=Broker.name)
        return
    # A scheduler on the loopback needs no cryptography.
    from fusion_dask.broker.door import Door

    scheduler.add_plugin(Broker(archive=Path(state) / "profiles"), name=Broker.name)
    scheduler.add_plugin(Door(Path(state) / "tokens.json"), name=Door.name)
