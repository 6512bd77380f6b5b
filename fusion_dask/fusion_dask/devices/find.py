"""Finding the devices of this machine, without loading a compute library.

NVIDIA by its management library (NVML, through nvidia-ml-py), AMD by the kernel's list of compute nodes
(kfd), Apple by the platform; the CPU by psutil.

Covers: what is there and may be used. Not covered: how fast it is (`worker/probe.py`). NVML, kfd and
MPS were never run on hardware here: they are tested through fakes of NVML's calls and of kfd's files.

Invariant: what the environment hides (`CUDA_VISIBLE_DEVICES` and its like) is not found.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import psutil  # type: ignore[import-untyped]
import pynvml  # type: ignore[import-untyped]

from fusion_dask.planner.profile import DeviceKind

__all__ = ["Device", "Nvml", "amd_devices", "cpu_device", "find_gpus", "nvidia_devices"]

KFD: Final = Path("/sys/class/kfd/kfd/topology/nodes")
#: What kfd calls a bank of device memory: public, or private to the device.
DEVICE_HEAPS: Final = {"1", "2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that a worker can be pinned to.

    Attributes:
        kind: What drives it.
        id: A UUID, or `mps` or `cpu`.
        name: Of the model.
        index: Among the devices of its kind.
        memory_bytes: All that it has.
    """

    kind: DeviceKind
    id: str
    name: str
    index: int
    memory_bytes: int


class Nvml(Protocol):
    """The calls of NVML that are used here."""

    def nvmlInit(self) -> None: ...  # noqa: D102
    def nvmlShutdown(self) -> None: ...  # noqa: D102
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: D102
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: D102, ANN401
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...  # noqa: D102, ANN401
    def nvmlDeviceGetName(self, handle: Any) -> str: ...  # noqa: D102, ANN401
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: D102, ANN401


def find_gpus(environ: Mapping[str, str] = os.environ) -> list[Device]:
    """All GPUs that this process may use."""
    nvidia = _visible(nvidia_devices(pynvml), environ.get("CUDA_VISIBLE_DEVICES"))
    hidden = environ.get("ROCR_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES"))
    amd = _visible(amd_devices(KFD), hidden)
    return [*nvidia, *amd, *_apple()]


def nvidia_devices(nvml: Nvml) -> list[Device]:
    """NVIDIA's, or none where its driver is not."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            devices.append(
                Device(
                    kind="cuda",
                    id=nvml.nvmlDeviceGetUUID(handle),
                    name=nvml.nvmlDeviceGetName(handle),
                    index=index,
                    memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
        return devices
    finally:
        nvml.nvmlShutdown()


def amd_devices(nodes: Path) -> list[Device]:
    """AMD's, as kfd lists them below `nodes`; CPUs are nodes without a `gpu_id`."""
    devices: list[Device] = []
    folders = [folder for folder in nodes.glob("*") if folder.name.isdigit()]
    for node in sorted(folders, key=lambda folder: int(folder.name)):
        if _read(node / "gpu_id") in {"", "0"}:
            continue
        properties = _properties(node / "properties")
        banks = [_properties(bank) for bank in node.glob("mem_banks/*/properties")]
        memory = sum(int(b["size_in_bytes"]) for b in banks if b.get("heap_type") in DEVICE_HEAPS)
        devices.append(
            Device(
                kind="rocm",
                id=f"GPU-{int(properties.get('unique_id', '0')):016x}",
                name=_read(node / "name") or "AMD GPU",
                index=len(devices),
                memory_bytes=memory,
            )
        )
    return devices


def cpu_device() -> Device:
    """The CPU and the machine's memory."""
    return Device(
        kind="cpu",
        id="cpu",
        name=_cpu_name(),
        index=0,
        memory_bytes=int(psutil.virtual_memory().total),
    )


def _visible(devices: Sequence[Device], chosen: str | None) -> list[Device]:
    """Those that a variable such as `CUDA_VISIBLE_DEVICES` names; it ends at the first unknown one."""
    if chosen is None:
        return list(devices)
    visible: list[Device] = []
    for name in (part.strip() for part in chosen.split(",")):
        matching = [d for d in devices if name == str(d.index) or (name and d.id.startswith(name))]
        if len(matching) != 1:
            break
        visible += matching
    return visible


def _apple() -> list[Device]:
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return []
    # Memory is shared with the CPU.
    total = int(psutil.virtual_memory().total)
    return [Device(kind="mps", id="mps", name="Apple GPU", index=0, memory_bytes=total)]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _properties(path: Path) -> dict[str, str]:
    """Lines of `name value`."""
    words = (line.split() for line in _read(path).splitlines())
    return {pair[0]: pair[1] for pair in words if len(pair) == 2}
