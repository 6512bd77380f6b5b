"""When a worker is measured, and who is told.

A worker says hello before it joins, and is let in or not. Then it is measured on a thread of its own, again
whenever it has been idle for a while, and its profile is corrected by what real stages take.

Covers: the worker's side of membership. Not covered: measuring (`probe.py`, `links.py`), what the broker
makes of it (`broker/members.py`).

Invariant: no measurement begins while a task runs or a stage is resident, but for the correction.
"""

import asyncio
import logging
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from distributed import Worker

from fusion_dask.devices.find import cpu_device
from fusion_dask.errors import ClusterError, ProfileError
from fusion_dask.planner.profile import DeviceKind, Profile, profile_from_json, profile_to_json
from fusion_dask.security.versions import versions
from fusion_dask.worker.links import measure_links
from fusion_dask.worker.plugin import FusionWorker
from fusion_dask.worker.probe import measure_disk, measure_rates, usable_memory
from fusion_dask.worker.settings import WorkerSettings
from fusion_dask.worker.turns import turn
from fusion_dask.worker.warm import warm_up

__all__ = ["Probing", "corrected"]

REPEAT_S: Final = 600.0
RETRY_S: Final = 1.0
#: Weight of the newest stage in the mean of the efficiencies.
NEWEST: Final = 0.3

logger = logging.getLogger(__name__)


def corrected(profile: Profile, *, dtype: str, flops: float, seconds: float) -> Profile:
    """A profile after a stage computed `flops` in `seconds`: its efficiency is an EWMA.

    Args:
        profile: As it was.
        dtype: In which the stage multiplied matrices.
        flops: That the stage did, forward and backward.
        seconds: That it computed, waiting aside.
    """
    rate = profile.flops_per_s.get(dtype)
    if rate is None or flops <= 0 or seconds <= 0:
        return profile
    seen = flops / seconds / rate
    known = profile.efficiency
    return replace(profile, efficiency=seen if known is None else known + NEWEST * (seen - known))


class Probing:
    """Measures one worker in its idle time.

    Args:
        worker: The worker.
        plugin: Its plugin.
        settings: Its settings.
    """

    def __init__(self, worker: Worker, plugin: FusionWorker, settings: WorkerSettings) -> None:
        self._worker = worker
        self._plugin = plugin
        self._settings = settings
        self._device = plugin.device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fusion-probe")
        self._ended = threading.Event()
        self._profile: Profile | None = None
        self._task: asyncio.Task[None] | None = None

    async def say_hello(self) -> bool:
        """Announce the worker; False where nobody keeps members.

        Raises:
            ClusterError: The broker does not let it in.
        """
        member = {
            "name": str(self._worker.name),
            "provider": self._settings.provider,
            "device": self._settings.device or self._device.type,
            "kind": self._kind(),
            "backup": self._settings.backup,
            "probes": self._settings.probe_s > 0,
            "versions": versions(),
            "pid": os.getpid(),
        }
        while True:
            try:
                answer: Any = await self._worker.scheduler.fusion_hello(
                    address=self._worker.address, member=member
                )
                break
            except OSError:
                # As the worker itself does: its death timeout ends this.
                await asyncio.sleep(RETRY_S)
        if answer is None:
            logger.warning("the scheduler has no Fusion broker; this worker is not measured")
            return False
        if answer["status"] != "OK":
            raise ClusterError(f"refused by the broker: {answer['reason']}")
        return True

    def start(self) -> None:
        """Measure from now on, in the background."""
        self._plugin.on_stage = self.observed
        self._task = asyncio.create_task(self._run(), name="fusion-probing")

    async def close(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
        # The interpreter waits for this thread before it ends.
        self._ended.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def observed(self, dtype: str, flops: float, seconds: float) -> None:
        """A stage computed; called from the task's thread."""
        if self._profile is None or self._plugin.loop is None:
            return
        self._profile = corrected(self._profile, dtype=dtype, flops=flops, seconds=seconds)
        asyncio.run_coroutine_threadsafe(self._report(), self._plugin.loop)

    async def _run(self) -> None:
        while True:
            pause_s = REPEAT_S
            try:
                if not await self._probe():
                    pause_s = RETRY_S
            except Exception as error:
                # Of torch, of an emulated memory that is too small, of a lost connection, or of a broker
                # that is of no use: nothing of it ends a worker that computes well.
                logger.warning("not measured, tried again in %.0f s: %r", REPEAT_S, error)
            await asyncio.sleep(pause_s)

    def _is_idle(self) -> bool:
        is_running = self._worker.status.name == "running"
        return is_running and not self._worker.state.executing and self._plugin.resident is None

    async def _probe(self) -> bool:
        """Measure and report, unless the worker has something to do."""
        if not self._is_idle():
            return False
        loop = asyncio.get_running_loop()
        measured = await loop.run_in_executor(self._thread, self._measure)
        if measured is None:
            return False
        begin = time.perf_counter()
        links = await measure_links(
            self._worker,
            self._plugin.link,
            os.environ.get("FUSION_STORE"),
            # Another worker chooses other peers.
            random.Random(f"{self._worker.name}{begin}"),
        )
        known = None if self._profile is None else self._profile.efficiency
        self._profile = replace(
            measured,
            links=links,
            efficiency=known,
            probe_s=measured.probe_s + time.perf_counter() - begin,
        )
        await self._report()
        return True

    async def _report(self) -> None:
        assert self._profile is not None
        try:
            plain = profile_to_json(self._profile)
            # What the broker would refuse is a fault of this probe, to be seen here.
            profile_from_json(plain)
            await self._worker.scheduler.fusion_profile(address=self._worker.address, profile=plain)
        except (OSError, ProfileError) as error:
            logger.warning("the profile was not reported: %s", error)

    def _measure(self) -> Profile | None:
        settings, emulation = self._settings, self._settings.emulation
        # Its imports, on another thread, would be in the way.
        warm_up()
        folder = Path(self._worker.local_directory)
        # Those of one machine share its CPU: two at once would measure half of it.
        with turn(folder.parent / "fusion-probe.lock", self._ended):
            # The others took their time: a stage may have come.
            if self._ended.is_set() or not self._is_idle():
                return None
            begin = time.perf_counter()
            room = usable_memory(
                self._device, cap_bytes=settings.memory_bytes, sharers=settings.sharers
            )
            rates = measure_rates(
                self._device,
                budget_s=settings.probe_s,
                pace=self._plugin.pace,
                room_bytes=room,
                ended=self._ended,
            )
            disk = measure_disk(folder)
            took_s = time.perf_counter() - begin
        return Profile(
            device=self._name(),
            kind=self._kind(),
            threads=settings.threads or os.cpu_count() or 1,
            flops_per_s=rates.flops_per_s,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            free_memory_bytes=room,
            host_to_device_bytes_per_s=rates.host_to_device_bytes_per_s,
            device_to_host_bytes_per_s=rates.device_to_host_bytes_per_s,
            disk_write_bytes_per_s=None if disk is None else disk.write_bytes_per_s,
            disk_read_bytes_per_s=None if disk is None else disk.read_bytes_per_s,
            emulated=None if emulation is None else emulation.name,
            measured_at=time.time(),
            probe_s=took_s,
        )

    def _kind(self) -> DeviceKind:
        if self._device.type == "cuda":
            return "rocm" if torch.version.hip else "cuda"
        return "mps" if self._device.type == "mps" else "cpu"

    def _name(self) -> str:
        if self._device.type == "cuda":
            return str(torch.cuda.get_device_name(self._device))
        return "Apple GPU" if self._device.type == "mps" else cpu_device().name
