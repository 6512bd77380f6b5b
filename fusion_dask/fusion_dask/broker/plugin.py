"""The broker as a Dask scheduler plugin: a thin driver of the pure records beside it.

Handlers, called by workers and clients over Dask's own connections:

    fusion_hello, fusion_profile            a worker joins, a worker was measured
    fusion_drain                            a provider takes its workers back
    fusion_place, fusion_where,             where the stages of a run are
    fusion_lost, fusion_release
    fusion_workers, fusion_status           who can take a stage; everything, for people
    fusion_echo                             the other end of a link's measurement

The scheduler carries none of the boundary tensors.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.protocol.serialize import to_serialize

from fusion_dask.broker import archive
from fusion_dask.broker.contribution import Contributions, Load
from fusion_dask.broker.directory import Directory
from fusion_dask.broker.entry import admit, provider_of
from fusion_dask.broker.members import Hello, Member, Members
from fusion_dask.broker.report import status_of
from fusion_dask.errors import FusionError, SecurityError
from fusion_dask.planner.profile import profile_from_json

__all__ = ["PROGRESS", "Broker"]

#: Topic of a run's steps is this and the run's name.
PROGRESS = "fusion/"
#: Longest echo; a link is measured with less.
ECHO_BYTES = 64 * 1024 * 1024
#: Workers that said hello and have not joined yet.
ANNOUNCED = 1000


class Broker(SchedulerPlugin):
    """Keeps the books of the pool and answers questions about it.

    Args:
        archive: Folder that keeps the profiles over a restart, or None.
        clock: Unix time in seconds.
    """

    name = "fusion-broker"
    idempotent = True

    def __init__(self, archive: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.directory = Directory()
        self.members = Members()
        self.contributions = Contributions()
        self._announced: dict[str, Hello] = {}
        self._archive = archive
        self._clock = clock

    def __reduce__(self) -> tuple[type["Broker"], tuple[()]]:
        """A plugin that a client registers arrives empty."""
        return Broker, ()

    async def start(self, scheduler: Scheduler) -> None:
        """Install the handlers; called by Dask before the first worker."""
        self._scheduler = scheduler
        if self._archive is not None:
            known = await asyncio.to_thread(archive.recall, self._archive)
            self.members = Members(by_name={member.hello.name: member for member in known})
        scheduler.handlers.update(
            fusion_hello=self.hello,
            fusion_profile=self.profile,
            fusion_drain=self.drain,
            fusion_place=self.place,
            fusion_where=self.where,
            fusion_lost=self.lost,
            fusion_release=self.release,
            fusion_workers=self.workers,
            fusion_status=self.status,
            fusion_echo=self.echo,
        )

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by Dask when a worker has joined; it said hello before."""
        del scheduler
        hello = self._announced.pop(worker, None)
        if hello is not None:
            self.members = self.members.joined(hello, worker, now=self._clock())

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:  # noqa: ANN401
        """Called by Dask when a worker has left."""
        del scheduler
        self.directory = self.directory.worker_lost(worker, f"worker {worker} left the cluster")
        self.members = self.members.left(worker, "its connection ended", now=self._clock())

    def log_event(self, topic: str, msg: Any) -> None:  # noqa: ANN401 - whatever anybody logs
        """Called by Dask with every event; the steps of runs are among them."""
        if topic.startswith(PROGRESS):
            seconds = float(msg["measure"]["seconds"])
            self.contributions = self.contributions.stepped(topic.removeprefix(PROGRESS), seconds)

    async def hello(self, comm: Any, address: str, member: Mapping[str, Any]) -> dict[str, str]:  # noqa: ANN401
        """A worker is about to join; it is let in, or refused with the reason."""
        # Whose it is, its certificate says; without one, on the loopback, it does itself.
        provider = provider_of(comm) or member.get("provider")
        try:
            hello = admit({**member, "provider": provider})
        except FusionError as error:
            return {"status": "refused", "reason": str(error)}
        # Of those that never came after all, some are forgotten.
        for forgotten in list(self._announced)[: max(0, len(self._announced) - ANNOUNCED)]:
            del self._announced[forgotten]
        self._announced[address] = hello
        return {"status": "OK"}

    async def profile(self, address: str, profile: Mapping[str, Any]) -> dict[str, str]:
        """A worker was measured."""
        measured = profile_from_json(profile)
        self.members = self.members.profiled(address, measured, now=self._clock())
        member = self.members.at(address)
        if member is not None and self._archive is not None:
            await asyncio.to_thread(archive.keep, self._archive, member)
        return {"status": "OK"}

    async def drain(self, comm: Any, provider: str) -> dict[str, Any]:  # noqa: ANN401
        """Give a provider's workers no new stage; which of them are still busy."""
        if provider_of(comm) not in {None, provider}:
            raise SecurityError(f"a provider takes back its own workers, not those of {provider}")
        self.members = self.members.drained(provider, now=self._clock())
        workers = self.members.of_provider(provider)
        return {
            "workers": {
                m.address: {"name": m.hello.name, "busy": self._is_busy(m)} for m in workers
            }
        }

    async def place(
        self,
        run: str,
        epoch: int,
        addresses: Mapping[str, str],
        load: Mapping[str, Any],
    ) -> dict[str, str]:
        """Record where the stages of an attempt are, and what its steps cost."""
        by_stage = {int(stage): address for stage, address in addresses.items()}
        self.directory = self.directory.placed(run, epoch, by_stage)
        cost = Load(tokens_per_step=load["tokens_per_step"], flops=tuple(load["flops"]))
        self.contributions = self.contributions.placed(run, cost)
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
        self.contributions = self.contributions.released(run)
        return {"status": "OK"}

    async def workers(self) -> dict[str, Any]:
        """Name -> state of every present member; a worker that is no member is not named."""
        return {
            name: member.state
            for name, member in self.members.by_name.items()
            if member.state != "left"
        }

    async def status(self) -> dict[str, Any]:
        """Everything that people want to know of the pool."""
        return status_of(self.members, self.directory, self.contributions, now=self._clock())

    async def echo(self, data: Any, reply_bytes: int) -> dict[str, Any]:  # noqa: ANN401 - bytes
        """Answer with `reply_bytes` bytes; what came is dropped."""
        del data
        if not 0 <= reply_bytes <= ECHO_BYTES:
            raise ValueError(f"an echo of {reply_bytes} bytes; at most {ECHO_BYTES}")
        return {"data": to_serialize(bytes(reply_bytes))}

    def _is_busy(self, member: Member) -> bool:
        worker = self._scheduler.workers.get(member.address)
        return bool(self.directory.held_by(member.address)) or bool(worker and worker.processing)
