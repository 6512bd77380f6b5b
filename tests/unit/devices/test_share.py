"""Sharing a machine out: one worker a device, and disjoint cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.devices.emulation import Emulation, Shape, emulations, parse_shape
from fusion_dask.devices.find import Device
from fusion_dask.devices.share import choose, emulate, share_out
from fusion_dask.errors import DeviceError
from fusion_dask.planner.catalogue import catalogue

CPU = Device(kind="cpu", id="cpu", name="CPU", index=0, memory_bytes=1 << 34)
GPUS = [
    Device(kind="cuda", id=f"GPU-{letter}-1", name="RTX 3080", index=index, memory_bytes=10)
    for index, letter in enumerate("abc")
]


def test_every_gpu_gets_a_worker_that_sees_no_other() -> None:
    shares = share_out(choose("all", GPUS, CPU), cores=range(6))
    visible = [share.as_environment()["CUDA_VISIBLE_DEVICES"] for share in shares]
    assert visible == ["GPU-a-1", "GPU-b-1", "GPU-c-1"]
    assert len({core for share in shares for core in share.cores}) == 6


def test_an_amd_gpu_is_named_to_its_runtime_and_is_the_first_that_hip_sees() -> None:
    gpu = Device(kind="rocm", id="GPU-00ff", name="RX", index=1, memory_bytes=1)
    (share,) = share_out([gpu], cores=[0])
    variables = share.as_environment()
    assert (variables["ROCR_VISIBLE_DEVICES"], variables["HIP_VISIBLE_DEVICES"]) == (
        "GPU-00ff",
        "0",
    )


def test_without_a_gpu_the_cpu_is_the_device() -> None:
    assert choose("all", [], CPU) == [CPU]
    (share,) = share_out([CPU], cores=[0, 1])
    assert share.as_environment()["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("asked", "ids"),
    [("gpu2,gpu0", ["GPU-c-1", "GPU-a-1"]), ("GPU-b", ["GPU-b-1"]), ("cpu*2", ["cpu", "cpu"])],
)
def test_devices_are_chosen_by_number_or_uuid(asked: str, ids: list[str]) -> None:
    assert [device.id for device in choose(asked, GPUS, CPU)] == ids


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("gpu7", "no device of this machine"),
        ("GPU-", "several"),
        ("gpu0,GPU-a", "twice"),
        ("", "no device"),
        ("cpu*0", "form"),
    ],
)
def test_what_fits_no_device_is_refused(asked: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        choose(asked, GPUS, CPU)


@given(st.integers(1, 9), st.integers(1, 9))
def test_cores_are_disjoint_while_there_are_enough(workers: int, cores: int) -> None:
    shares = share_out([CPU] * workers, cores=range(cores))
    taken = [core for share in shares for core in share.cores]
    assert set(taken) <= set(range(cores))
    assert len(set(taken)) == min(cores, len(taken))
    assert {share.threads for share in shares} == {max(1, cores // workers)}


SPEEDS = st.lists(st.sampled_from(sorted(catalogue())), min_size=1, max_size=8)


@given(SPEEDS, st.integers(1, 16))
def test_emulated_speeds_keep_their_ratios_and_fit_the_cores(names: list[str], cores: int) -> None:
    made = emulations(",".join(names), cores=cores, available_bytes=10**10)
    rates = [catalogue()[name].fp16_flops_per_s for name in names]
    for emulation, rate in zip(made, rates, strict=True):
        assert emulation.fraction / made[0].fraction == pytest.approx(rate / rates[0])
        assert 0 < emulation.fraction <= 1
    assert sum(e.fraction for e in made) <= max(0.95 * cores, 1e-9) + 1e-9
    assert sum(e.memory_bytes for e in made) <= 0.7e10 + len(made)


def test_emulations_are_written_in_many_ways() -> None:
    made = emulations(
        "2*rtx3080@100mbit/20ms,cpu:0.5", cores=64, available_bytes=1, link=parse_shape("1gbit/1ms")
    )
    assert [e.name for e in made] == ["rtx3080", "rtx3080", "cpu"]
    assert made[0].link == Shape(bytes_per_s=12.5e6, delay_s=0.02)
    assert made[2].link == Shape(bytes_per_s=125e6, delay_s=0.001)
    shares = emulate(made, CPU, cores=[0, 1])
    assert Emulation.from_json(shares[0].as_environment()["FUSION_EMULATE"]) == made[0]
    assert {share.threads for share in shares} == {1}


@pytest.mark.parametrize(
    "text", ["", "rtx1", "rtx3080:0", "rtx3080:x", "0*cpu", "99*cpu", "cpu@fast", "cpu@0mbit/1ms"]
)
def test_what_cannot_be_emulated_is_refused(text: str) -> None:
    with pytest.raises(DeviceError):
        emulations(text, cores=1, available_bytes=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"name": "x", "fraction": 2, "memory_bytes": 1, "link": null}',
        '{"name": "x", "fraction": NaN, "memory_bytes": 1, "link": null}',
        '{"name": "x", "fraction": "1", "memory_bytes": 1, "link": null}',
        '{"name": 7, "fraction": 1, "memory_bytes": 1, "link": null}',
        '{"name": "x", "fraction": 1, "memory_bytes": -1, "link": null}',
        '{"name": "x", "fraction": 1, "memory_bytes": Infinity, "link": null}',
        '{"name": "x", "fraction": 1, "memory_bytes": "8", "link": null}',
        '{"name": "x", "fraction": 1, "memory_bytes": 1, "link": {"bytes_per_s": 0, "delay_s": 0}}',
        '{"name": "x", "fraction": 1, "memory_bytes": 1, "link": {"bytes_per_s": 1, "delay_s": -1}}',
        '{"name": "x", "fraction": 1, "memory_bytes": 1, "link": {"bytes_per_s": "1", "delay_s": 0}}',
    ],
)
def test_a_damaged_variable_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="FUSION_EMULATE"):
        Emulation.from_json(text)
