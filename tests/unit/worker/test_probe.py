"""The probe's rules. What it measures is looked at in tests/bench/probe.py."""

import contextlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.planner.profile import Profile
from fusion_dask.worker import probe
from fusion_dask.worker.memory import is_out_of_memory
from fusion_dask.worker.pace import Pace
from fusion_dask.worker.probe import measure_disk, measure_rates, usable_memory
from fusion_dask.worker.probing import corrected

CPU = torch.device("cpu")
PROFILE = Profile(
    device="CPU",
    kind="cpu",
    threads=1,
    flops_per_s={"float32": 1e9, "bfloat16": 4e9},
    memory_bytes_per_s=1e9,
    free_memory_bytes=1,
    measured_at=1.0,
    probe_s=1.0,
)


def test_every_rate_of_a_cpu_is_measured_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CPU_SIZE", 64)
    made: list[int] = []
    ones = torch.ones

    def watched(length: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(4 * length)
        return ones(length, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "ones", watched)
    rates = measure_rates(CPU, budget_s=0.05, pace=Pace(), room_bytes=1 << 20)
    assert "float32" in rates.flops_per_s
    assert min(*rates.flops_per_s.values(), rates.memory_bytes_per_s) > 0
    assert rates.host_to_device_bytes_per_s is rates.device_to_host_bytes_per_s is None
    # Its copy has as much again.
    assert 2 * sum(made) <= 1 << 19


def test_a_dtype_that_is_of_no_use_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(size: int, dtype: torch.dtype, device: torch.device) -> object:
        del size, device
        return None if dtype is torch.float16 else lambda: dtype

    seconds = {torch.float32: 1.0, torch.bfloat16: 1.0 + probe.USELESS}

    class Timer(SimpleNamespace):
        def seconds(self, work: object, repeats: int, pace: Pace) -> float:
            del repeats, pace
            return seconds[work()]  # type: ignore[operator]

        def best_rates(self, works: dict[str, object], budget_s: float) -> dict[str, float]:
            del budget_s
            return dict.fromkeys(works, 1.0)

    monkeypatch.setattr(probe, "_product", product)
    monkeypatch.setattr(probe, "_Timer", Timer)
    rates = measure_rates(CPU, budget_s=1.0, pace=Pace(), room_bytes=64)
    assert rates.flops_per_s == {"float32": 2.0 * probe.CPU_SIZE**3}


def test_a_measurement_that_nobody_wants_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CPU_SIZE", 8)
    ended = threading.Event()
    ended.set()
    # For the pytest timeout to be what fails.
    measure_rates(CPU, budget_s=1e9, pace=Pace(), room_bytes=1 << 20, ended=ended)


@given(st.integers(1, 10**12), st.one_of(st.none(), st.integers(1, 10**12)), st.integers(1, 9))
def test_no_more_memory_is_lent_than_is_free(free: int, cap: int | None, sharers: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
        usable = usable_memory(CPU, cap_bytes=cap, sharers=sharers)
    assert usable >= 1
    assert sharers * usable <= max(free, sharers)
    assert cap is None or usable <= cap


def test_the_disk_is_measured_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "DISK_BYTES", 2 << 20)
    monkeypatch.setattr(probe, "DISK_CHUNK_BYTES", 1 << 20)
    disk = measure_disk(tmp_path)
    assert disk is not None
    assert min(disk.read_bytes_per_s, disk.write_bytes_per_s) > 0
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_is_measured_with_what_there_is_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    monkeypatch.setattr(probe, "DISK_BYTES", 1 << 40)
    monkeypatch.setattr(probe, "DISK_CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(probe, "DISK_S", 1e-9)
    disk = measure_disk(tmp_path)
    assert disk is not None
    assert min(disk.read_bytes_per_s, disk.write_bytes_per_s) > 0
    assert len(flushed) == 1


def test_a_device_slower_than_the_budget_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Pace):
        windows = 0

        def work(self) -> contextlib._GeneratorContextManager[None]:
            self.windows += 1
            return super().work()

    monkeypatch.setattr(probe, "CPU_SIZE", 8)
    pace = Counted()
    rates = measure_rates(CPU, budget_s=1e-9, pace=pace, room_bytes=1 << 20)
    # Each dtype, and the copy.
    assert pace.windows == len(rates.flops_per_s) + 1
    assert min(*rates.flops_per_s.values(), rates.memory_bytes_per_s) > 0


def test_a_folder_that_cannot_be_written_has_no_rate(tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "absent") is None


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=9))
def test_the_efficiency_moves_towards_what_stages_reach(efficiencies: list[float]) -> None:
    profile = PROFILE
    for efficiency in efficiencies:
        before = profile.efficiency
        profile = corrected(profile, dtype="bfloat16", flops=efficiency * 4e9, seconds=1.0)
        assert profile.efficiency is not None
        if before is None:
            assert profile.efficiency == pytest.approx(efficiency)
        else:
            assert profile.efficiency == pytest.approx(0.7 * before + 0.3 * efficiency)


@pytest.mark.parametrize(
    ("dtype", "flops", "seconds"), [("float16", 1.0, 1.0), ("float32", 0.0, 1.0)]
)
def test_a_stage_that_says_nothing_of_the_device_changes_nothing(
    dtype: str, flops: float, seconds: float
) -> None:
    assert corrected(PROFILE, dtype=dtype, flops=flops, seconds=seconds) is PROFILE


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: Exception, is_full: bool) -> None:
    assert is_out_of_memory(error) is is_full
