"""The broker as a Dask scheduler plugin: a thin driver of the pure `Directory`.

Handlers, called by workers and clients over Dask's own connections: `fusion_place`, `fusion_where`,
`fusion_lost`, `fusion_release`. The scheduler carries none of the boundary tensors.
"""

from typing import Any

from distributed import Scheduler, SchedulerPlugin

from fusion_dask.broker.directory import Directory

__all__ = ["Broker"]


class Broker(SchedulerPlugin):
    """Keeps the directory and answers questions about it."""

    name = "fusion-broker"
    idempotent = True

    def __init__(self) -> None:
        self.directory = Directory()

    async def start(self, scheduler: Scheduler) -> None:
        """Install the handlers; called by Dask before the first worker."""
        scheduler.handlers.update(
            fusion_place=self.place,
            fusion_where=self.where,
            fusion_lost=self.lost,
            fusion_release=self.release,
        )

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:  # noqa: ANN401
        """Called by Dask when a worker has left."""
        self.directory = self.directory.worker_lost(worker, f"worker {worker} left the cluster")

    async def place(self, run: str, epoch: int, addresses: dict[str, str]) -> dict[str, str]:
        """Record where the stages of an attempt are."""
        by_stage = {int(stage): address for stage, address in addresses.items()}
        self.directory = self.directory.placed(run, epoch, by_stage)
        return {"status": "OK"}

    async def where(self, run: str, epoch: int, stage: int) -> dict[str, Any]:
        """The address of a stage, or the reason why there is none."""
        address = self.directory.where(run, epoch, stage)
        if address is not None:
            return {"address": address}
        reason = self.directory.lost(run).get(stage, "the run was stopped or started anew")
        return {"address": None, "reason": reason}

    async def lost(self, run: str) -> dict[str, str]:
        """The lost stages of a run; keys are strings, as msgpack wants them."""
        return {str(stage): reason for stage, reason in self.directory.lost(run).items()}

    async def release(self, run: str) -> dict[str, str]:
        """Forget a run."""
        self.directory = self.directory.released(run)
        return {"status": "OK"}
