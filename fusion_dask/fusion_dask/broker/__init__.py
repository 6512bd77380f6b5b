"""The broker: the scheduler side of the engine, and the preload that installs it.

dask scheduler --preload fusion_dask.broker
"""

from distributed import Scheduler

from fusion_dask.broker.plugin import Broker

__all__ = ["Broker", "dask_setup"]


def dask_setup(scheduler: Scheduler) -> None:
    """Called by Dask when the scheduler starts."""
    scheduler.add_plugin(Broker(), name=Broker.name)
