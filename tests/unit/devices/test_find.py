"""Finding devices, through fakes of NVML's calls and of the kernel's files."""

from dataclasses import dataclass
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from fusion_dask.devices import find
from fusion_dask.devices.find import amd_devices, cpu_device, find_gpus, nvidia_devices


@dataclass
class FakeMemory:
    total: int


class FakeNvml:
    """Three cards; knows whether it was shut down."""

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA GeForce RTX 3080"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> FakeMemory:
        return FakeMemory(total=10 << 30)


def test_nvidia_gpus_are_found_by_uuid_and_nvml_is_closed() -> None:
    nvml = FakeNvml()
    found = nvidia_devices(nvml)
    assert [(d.kind, d.id, d.index, d.memory_bytes) for d in found] == [
        ("cuda", f"GPU-{i}{i}", i, 10 << 30) for i in range(3)
    ]
    assert nvml.open == 0


def test_no_driver_is_no_gpu() -> None:
    assert nvidia_devices(FakeNvml(has_driver=False)) == []


@pytest.mark.parametrize(
    ("variable", "ids"),
    [
        ("GPU-22,0", ["GPU-22", "GPU-00"]),
        ("", []),
        ("-1", []),
        ("1,9,2", ["GPU-11"]),
    ],
)
def test_what_the_environment_hides_is_not_found(
    variable: str, ids: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(find, "nvidia_devices", lambda _: nvidia_devices(FakeNvml()))
    monkeypatch.setattr(find, "KFD", tmp_path)
    assert [d.id for d in find_gpus({"CUDA_VISIBLE_DEVICES": variable})] == ids


def test_amd_gpus_are_the_nodes_with_a_gpu_id(tmp_path: Path) -> None:
    for number, gpu_id in [(0, "0"), (1, "26287"), (10, "26288")]:
        node = tmp_path / str(number)
        (node / "mem_banks" / "0").mkdir(parents=True)
        (node / "gpu_id").write_text(gpu_id + "\n")
        (node / "name").write_text("gfx1100\n")
        (node / "properties").write_text(f"simd_count 96\nunique_id {255 + number}\n")
        (node / "mem_banks" / "0" / "properties").write_text(
            "heap_type 1\nsize_in_bytes 25753026560\n"
        )
    found = amd_devices(tmp_path)
    assert [(d.id, d.index) for d in found] == [
        ("GPU-0000000000000100", 0),
        ("GPU-0000000000000109", 1),
    ]
    assert {d.memory_bytes for d in found} == {25753026560}


def test_the_cpu_has_a_name_and_memory() -> None:
    cpu = cpu_device()
    assert cpu.name
    assert cpu.memory_bytes > 1 << 28
