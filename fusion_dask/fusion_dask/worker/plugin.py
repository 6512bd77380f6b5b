"""What makes a Dask worker a worker of this project: an outbox, one resident stage, a comm handler.

The handler `fusion_pull` answers a neighbour's question for a boundary tensor: when it is there, or
with `wait` after a while, so that the neighbour can ask the broker whether it still asks the right
worker. `fusion_stop` ends an attempt of a run, `fusion_release` forgets the run. A plain Dask worker gets all this through
`--preload fusion_dask.worker`, or from a client that registers the plugin.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from distributed import Worker, WorkerPlugin

from fusion_dask.errors import NeighbourFailed
from fusion_dask.worker.outbox import BoundaryKey, Channel, Outbox
from fusion_dask.worker.wire import pack

__all__ = ["PLUGIN_NAME", "FusionWorker", "fusion_worker"]

PLUGIN_NAME = "fusion"


class FusionWorker(WorkerPlugin):
    """State and handlers of this project on one worker.

    Attributes:
        outbox: Boundary tensors that neighbours will pull.
        resident: The stage that lives here between segments. One at most: another run's stage is
            restored from its checkpoint when its turn comes.
        loop: The worker's event loop, for those who come from the task thread.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.resident: object | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[type["FusionWorker"], tuple[()]]:
        """A plugin travels empty: its state belongs to one process."""
        return FusionWorker, ()

    def setup(self, worker: Worker) -> None:
        """Install the handlers; called on the worker's event loop."""
        self.loop = asyncio.get_running_loop()
        worker.handlers["fusion_pull"] = self.pull
        worker.handlers["fusion_stop"] = self.stop
        worker.handlers["fusion_release"] = self.release

    async def pull(
        self,
        key: Sequence[Any],
        received: Sequence[int] | None,
        wait_s: float,
    ) -> dict[str, Any]:
        """Answer with the boundary tensor `key`, with `wait`, or with the reason why not."""
        channel, step, microbatch = key
        name = BoundaryKey(Channel(*channel), step, microbatch)
        watermark = None if received is None else (received[0], received[1])
        future = asyncio.wrap_future(self.outbox.ask(name, watermark))
        try:
            tensors = await asyncio.wait_for(asyncio.shield(future), wait_s)
        except TimeoutError:
            return {"status": "wait"}
        except NeighbourFailed as error:
            return {"status": "failed", "stage": error.stage, "reason": error.reason}
        return {"status": "ready", "tensors": pack(tensors)}

    async def stop(self, run: str, epoch: int, stage: int, reason: str) -> dict[str, str]:
        """End an attempt of a run: whoever waits here for it gets the reason."""
        self.outbox.fail(run, epoch, NeighbourFailed(stage, reason))
        return {"status": "OK"}

    async def release(self, run: str) -> dict[str, str]:
        """Forget a run that has ended."""
        self.resident = None
        self.outbox.drop(run, 1 << 62)
        return {"status": "OK"}


def fusion_worker(worker: Worker) -> FusionWorker:
    """The plugin of a worker.

    Raises:
        KeyError: The worker was not started with the preload and no client registered the plugin.
    """
    plugin = worker.plugins[PLUGIN_NAME]
    assert isinstance(plugin, FusionWorker)
    return plugin
