"""The door of the broker: who may call what, and who is sent away.

Covers: the role guard on the scheduler's handlers, and members whose token was revoked: their new
connections are refused by the guard, those that are open are closed here. Not covered: who gets a
certificate (`security/`).

Invariant: `LOOK_S` after a revocation no connection of a revoked member to the scheduler is open.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

from distributed import Scheduler, SchedulerPlugin

from fusion_dask.errors import SecurityError
from fusion_dask.security.guard import guard, scheduler_allows
from fusion_dask.security.roles import serial_of
from fusion_dask.security.tokens import TokenBook

__all__ = ["Door"]

LOOK_S: Final = 2.0

logger = logging.getLogger(__name__)


class Door(SchedulerPlugin):
    """Guards a scheduler that speaks TLS.

    Args:
        tokens: The token book of `fusion up`.
    """

    name = "fusion-door"
    idempotent = True

    def __init__(self, tokens: Path) -> None:
        self._book = TokenBook(tokens)
        self._revoked: frozenset[str] = frozenset()
        self._watch: asyncio.Task[None] | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Install the guard over every handler that is there by now, and look at the book."""
        guard(scheduler, scheduler_allows, revoked=lambda: self._revoked)
        self._revoked = await asyncio.to_thread(self._book.revoked_serials)
        self._watch = asyncio.create_task(self._look(scheduler), name=self.name)

    async def close(self) -> None:
        """Called by Dask when the scheduler ends."""
        if self._watch is not None:
            self._watch.cancel()

    async def _look(self, scheduler: Scheduler) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                # What was revoked before stays revoked, whatever becomes of the book.
                self._revoked |= await asyncio.to_thread(self._book.revoked_serials)
                await self._send_away(scheduler)
            except (OSError, SecurityError) as error:
                logger.warning("the token book cannot be read: %s", error)

    async def _send_away(self, scheduler: Scheduler) -> None:
        for address, stream in list(scheduler.stream_comms.items()):
            if self._is_revoked(stream.comm):
                logger.warning("worker %s is sent away: its token was revoked", address)
                await scheduler.remove_worker(address, stimulus_id="fusion-revoked")
        for client, stream in list(scheduler.client_comms.items()):
            if self._is_revoked(stream.comm):
                logger.warning("client %s is sent away: its token was revoked", client)
                stream.abort()

    def _is_revoked(self, comm: Any) -> bool:  # noqa: ANN401 - distributed is untyped here
        certificate = comm.extra_info.get("peercert")
        return certificate is not None and serial_of(certificate) in self._revoked
