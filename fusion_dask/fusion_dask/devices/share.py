"""Sharing a machine out: which worker gets which device, cores and memory.

Covers: `--devices`, `--emulate` and `--memory`. Not covered: finding devices (`find.py`), applying a
share to a process (`worker/pin.py`).

Invariant: no two workers share a GPU; they share no core as long as there are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_dask.devices.emulation import Emulation
from fusion_dask.devices.find import Device
from fusion_dask.errors import DeviceError

__all__ = ["Share", "choose", "emulate", "share_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker may use.

    Attributes:
        device: It is pinned to this one.
        cores: And to these.
        threads: Threads of a kernel on the CPU. Part of what makes a result repeatable bit for bit.
        memory_bytes: What a stage may fill at most; None for all that is free.
        emulation: What it pretends to be, or None.
        sharers: Workers on this device; only a CPU has several.
    """

    device: Device
    cores: tuple[int, ...]
    threads: int
    memory_bytes: int | None = None
    emulation: Emulation | None = None
    sharers: int = 1

    def as_environment(self) -> dict[str, str]:
        """The variables that the worker, and the libraries in it, apply when they start."""
        variables = {
            "FUSION_CPUS": ",".join(map(str, self.cores)),
            "FUSION_THREADS": str(self.threads),
            "FUSION_DEVICE": self.device.id,
            "FUSION_SHARERS": str(self.sharers),
            **_visible_only(self.device),
        }
        if self.memory_bytes is not None:
            variables["FUSION_MEMORY_BYTES"] = str(self.memory_bytes)
        if self.emulation is not None:
            variables["FUSION_EMULATE"] = self.emulation.to_json()
        return variables


def choose(asked: str, gpus: Sequence[Device], cpu: Device) -> list[Device]:
    """The devices that `--devices` names: one worker each.

    Args:
        asked: `all` (every GPU, or the CPU if there is none), or a list of `cpu`, `cpu*3`, `gpu0`,
            or the beginning of a UUID.
        gpus: What there is.
        cpu: What there is too.

    Raises:
        DeviceError: A name fits no device or several, or one is named twice.
    """
    if asked == "all":
        return list(gpus) or [cpu]
    chosen: list[Device] = []
    for name in (part.strip() for part in asked.split(",")):
        if name.lower().partition("*")[0] == "cpu":
            chosen += [cpu] * _count(name)
            continue
        matching = [d for d in gpus if name == f"gpu{d.index}" or (name and d.id.startswith(name))]
        if len(matching) != 1:
            there = ", ".join(f"gpu{d.index} ({d.name}, {d.id})" for d in gpus) or "no GPU"
            fits = "fits several devices" if matching else "is no device of this machine"
            raise DeviceError(f"--devices: {name!r} {fits}; there is: cpu, {there}")
        if matching[0] in chosen:
            raise DeviceError(f"--devices: {name!r} is named twice; a GPU has one worker")
        chosen += matching
    return chosen


def share_out(
    devices: Sequence[Device],
    *,
    cores: Sequence[int],
    threads: int | None = None,
    memory_bytes: int | None = None,
) -> list[Share]:
    """Split cores among the workers of `devices`.

    Args:
        devices: One worker for each; a CPU may be named several times.
        cores: Of the machine.
        threads: Of each worker; as many as it has cores by default.
        memory_bytes: To lend of each device; None for all that is free.

    >>> cpu = Device(kind="cpu", id="cpu", name="CPU", index=0, memory_bytes=8)
    >>> [share.cores for share in share_out([cpu, cpu], cores=[0, 1, 2, 3, 4])]
    [(0, 1), (2, 3)]
    """
    each = max(1, len(cores) // len(devices))
    return [
        Share(
            device=device,
            cores=tuple(cores[(index * each + offset) % len(cores)] for offset in range(each)),
            threads=threads or each,
            memory_bytes=None if memory_bytes is None else memory_bytes // devices.count(device),
            sharers=devices.count(device),
        )
        for index, device in enumerate(devices)
    ]


def emulate(emulations: Sequence[Emulation], cpu: Device, *, cores: Sequence[int]) -> list[Share]:
    """One worker for each emulation, with one thread each.

    They may use every core: what keeps their ratios is the pace, and the system balances better than a
    fixed assignment of unequal loads.
    """
    return [
        Share(
            device=cpu,
            cores=tuple(cores),
            threads=1,
            memory_bytes=emulation.memory_bytes,
            emulation=emulation,
        )
        for emulation in emulations
    ]


def _count(name: str) -> int:
    text = name.partition("*")[2] or "1"
    if not text.isdigit() or not 0 < int(text) <= 64:
        raise DeviceError(f"--devices: {name!r} is not of the form cpu or cpu*3")
    return int(text)


def _visible_only(device: Device) -> dict[str, str]:
    if device.kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": device.id}
    if device.kind == "rocm":
        # The runtime counts what it may see anew, so that HIP sees one device, its first.
        return {"ROCR_VISIBLE_DEVICES": device.id, "HIP_VISIBLE_DEVICES": "0"}
    if device.kind == "mps":
        return {}
    # A CPU worker on a machine with GPUs.
    return {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
