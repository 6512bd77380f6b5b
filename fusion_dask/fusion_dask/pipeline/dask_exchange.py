"""The boundary exchange between Dask workers: pull by comm handler, addresses from the broker.

A pull is one request on the connection pool of the worker's own event loop. It is asked again, after
a question to the broker, when the neighbour cannot be reached or has nothing yet; it ends with the
tensors, or with the reason why they will never come.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from distributed import Worker

from fusion_dask.errors import NeighbourFailed, StageLost
from fusion_dask.worker.outbox import BoundaryKey
from fusion_dask.worker.plugin import FusionWorker
from fusion_dask.worker.wire import unpack

__all__ = ["DaskExchange"]

#: A neighbour answers `wait` after this long; then the broker is asked whether it is still there.
WAIT_S = 5.0
#: Pause before a neighbour that could not be reached is asked again.
RETRY_S = 0.05


class DaskExchange:
    """The exchange of one stage task on a Dask worker."""

    def __init__(self, worker: Worker, plugin: FusionWorker) -> None:
        self._worker = worker
        self._plugin = plugin
        self._addresses: dict[int, str] = {}

    def publish(self, key: BoundaryKey, tensors: Sequence[torch.Tensor]) -> None:
        """Put tensors into the worker's outbox."""
        self._plugin.outbox.publish(key, tensors)

    def pull(
        self, key: BoundaryKey, received: tuple[int, int] | None
    ) -> Future[Sequence[torch.Tensor]]:
        """Start a pull on the worker's event loop."""
        assert self._plugin.loop is not None
        return asyncio.run_coroutine_threadsafe(self._pull(key, received), self._plugin.loop)

    async def _pull(
        self, key: BoundaryKey, received: tuple[int, int] | None
    ) -> Sequence[torch.Tensor]:
        source = key.channel.source
        while True:
            address = self._addresses.get(source) or await self._ask_broker(key)
            # The question travels too, on an emulated link.
            await asyncio.sleep(self._plugin.link.delay_s)
            try:
                reply = await self._worker.rpc(address).fusion_pull(
                    key=key, received=received, wait_s=WAIT_S
                )
            except OSError:
                self._addresses.pop(source, None)
                await asyncio.sleep(RETRY_S)
                continue
            if reply["status"] == "ready":
                tensors = unpack(reply["tensors"])
                size = sum(t.nbytes for t in tensors)
                await asyncio.sleep(self._plugin.link.receive(size, reply["sending_s"]))
                return tensors
            if reply["status"] == "failed":
                raise NeighbourFailed(reply["stage"], reply["reason"])
            self._addresses.pop(source, None)

    async def _ask_broker(self, key: BoundaryKey) -> str:
        channel = key.channel
        reply = await self._worker.scheduler.fusion_where(
            run=channel.run, epoch=channel.epoch, stage=channel.source
        )
        if reply["address"] is None:
            raise StageLost(channel.source, reply["reason"])
        address: str = reply["address"]
        self._addresses[channel.source] = address
        return address
