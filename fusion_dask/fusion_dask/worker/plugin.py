"""What makes a Dask worker a worker of this project: an outbox, one resident stage, a comm handler.

The handler `fusion_pull` answers a neighbour's question for a boundary tensor: when it is there, or
with `wait` after a while, so that the neighbour can ask the broker whether it still asks the right
worker. `fusion_stop` ends an attempt of a run, `fusion_release` forgets the run, `fusion_echo` is the
other end of a link's measurement. A plain Dask worker gets all this through
`--preload fusion_dask.worker`, or, where that was forgotten, from a client that registers `Onboard`.

Invariant: what the preload installed stays as long as the worker lives.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from distributed import Worker, WorkerPlugin
from distributed.protocol.serialize import to_serialize

from fusion_dask.devices.emulation import Emulation
from fusion_dask.errors import NeighbourFailed
from fusion_dask.worker.link import ShapedLink
from fusion_dask.worker.outbox import BoundaryKey, Channel, Outbox
from fusion_dask.worker.pace import Pace
from fusion_dask.worker.pin import default_device
from fusion_dask.worker.wire import pack

__all__ = ["PLUGIN_NAME", "FusionWorker", "Onboard", "fusion_worker"]

PLUGIN_NAME = "fusion"
#: Longest echo; a link is measured with less.
ECHO_BYTES = 64 * 1024 * 1024


class FusionWorker(WorkerPlugin):
    """State and handlers of this project on one worker.

    Attributes:
        outbox: Boundary tensors that neighbours will pull.
        resident: The stage that lives here between segments. One at most: another run's stage is
            restored from its checkpoint when its turn comes.
        loop: The worker's event loop, for those who come from the task thread.
        device: What stages compute on.
        pace: Of an emulated device; what computes does so within it.
        link: Of an emulated device; what is sent and received passes it.
        on_teardown: Called when the worker ends.
        on_stage: Told of every segment: dtype, FLOPs done, seconds computed.

    Args:
        emulation: What this worker behaves like, or None.
        device: The first accelerator, or the CPU, by default.
    """

    name = PLUGIN_NAME

    def __init__(
        self, emulation: Emulation | None = None, device: torch.device | None = None
    ) -> None:
        self.outbox = Outbox()
        self.device = device or default_device()
        self.pace = Pace() if emulation is None else Pace(emulation.fraction)
        self.link = ShapedLink(None if emulation is None else emulation.link)
        self.on_stage: Callable[[str, float, float], None] = _nobody
        self.on_teardown: Callable[[], Awaitable[None]] | None = None
        self.resident: object | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def setup(self, worker: Worker) -> None:
        """Install the handlers; called on the worker's event loop."""
        self.loop = asyncio.get_running_loop()
        worker.handlers["fusion_pull"] = self.pull
        worker.handlers["fusion_stop"] = self.stop
        worker.handlers["fusion_release"] = self.release
        worker.handlers["fusion_echo"] = self.echo

    async def teardown(self, worker: Worker) -> None:
        """Called by Dask when the worker ends."""
        del worker
        if self.on_teardown is not None:
            await self.on_teardown()

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
        departure = self.link.send(sum(t.nbytes for t in tensors))
        await asyncio.sleep(departure.wait_s)
        return {
            "status": "ready",
            "tensors": pack(tensors),
            "sending_s": departure.sending_s,
        }

    async def echo(
        self,
        data: bytes | bytearray | memoryview,
        reply_bytes: int,
        sending_s: float,
    ) -> dict[str, Any]:
        """Answer with `reply_bytes` bytes; what came is dropped once it is in.

        Args:
            data: Bytes to receive.
            reply_bytes: Bytes to send.
            sending_s: What the sender's end of the link took from the first byte to the last.
        """
        if not 0 <= reply_bytes <= ECHO_BYTES:
            raise ValueError(f"an echo of {reply_bytes} bytes; at most {ECHO_BYTES}")
        await asyncio.sleep(self.link.receive(memoryview(data).nbytes, sending_s))
        departure = self.link.send(reply_bytes)
        await asyncio.sleep(departure.wait_s)
        return {"data": to_serialize(bytes(reply_bytes)), "sending_s": departure.sending_s}

    async def stop(self, run: str, epoch: int, stage: int, reason: str) -> dict[str, str]:
        """End an attempt of a run: whoever waits here for it gets the reason."""
        self.outbox.fail(run, epoch, NeighbourFailed(stage, reason))
        return {"status": "OK"}

    async def release(self, run: str) -> dict[str, str]:
        """Forget a run that has ended."""
        self.resident = None
        self.outbox.drop(run, 1 << 62)
        return {"status": "OK"}


class Onboard(WorkerPlugin):
    """Makes a worker that was started without the preload one of ours; changes no other.

    A plugin that a client registers takes the place of one with the same name: the state of a worker, and
    what it emulates, would be gone.
    """

    name = f"{PLUGIN_NAME}-onboard"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Called by Dask on every worker, and on those that join later."""
        if PLUGIN_NAME not in worker.plugins:
            await worker.plugin_add(FusionWorker(), name=PLUGIN_NAME)


def _nobody(dtype: str, flops: float, seconds: float) -> None:
    """Nobody wants to know."""


def fusion_worker(worker: Worker) -> FusionWorker:
    """The plugin of a worker.

    Raises:
        KeyError: The worker was not started with the preload and no client registered the plugin.
    """
    plugin = worker.plugins[PLUGIN_NAME]
    assert isinstance(plugin, FusionWorker)
    return plugin
