"""What a worker is told by its environment, and that it gets it or does not start."""

import os

import pytest

from fusion_dask.devices.emulation import Emulation, emulations, parse_shape
from fusion_dask.devices.find import cpu_device
from fusion_dask.devices.share import emulate, share_out
from fusion_dask.errors import ClusterError, FusionError
from fusion_dask.worker.pin import default_device, pin_process
from fusion_dask.worker.settings import WorkerSettings, parse_cpus


def test_a_share_is_read_back() -> None:
    (emulation,) = emulations(
        "rtx3080:0.5", cores=2, available_bytes=1 << 30, link=parse_shape("1gbit/20ms")
    )
    (share,) = emulate([emulation], cpu_device(), cores=[0, 3])
    settings = WorkerSettings.from_environ(share.as_environment())
    assert sorted(settings.cpus or ()) == [0, 3]
    assert (settings.threads, settings.device) == (1, "cpu")
    assert settings.emulation == emulation
    assert settings.memory_bytes == emulation.memory_bytes
    assert settings.probe_s > 0
    assert not settings.backup


def test_workers_of_one_cpu_know_of_each_other() -> None:
    shares = share_out([cpu_device()] * 3, cores=range(6), memory_bytes=900)
    settings = [WorkerSettings.from_environ(share.as_environment()) for share in shares]
    assert [(s.sharers, s.memory_bytes) for s in settings] == [(3, 300)] * 3


def test_nothing_set_is_a_worker_of_this_host() -> None:
    settings = WorkerSettings.from_environ({})
    assert settings.provider
    unset = (settings.emulation, settings.memory_bytes, settings.cpus, settings.device)
    assert unset == (None, None, None, None)
    assert settings.sharers == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FUSION_CPUS", "0,x"),
        ("FUSION_CPUS", "3-2"),
        ("FUSION_THREADS", "0"),
        ("FUSION_THREADS", "-1"),
        ("FUSION_SHARERS", "two"),
        ("FUSION_MEMORY_BYTES", "8GB"),
        ("FUSION_PROBE_S", "-1"),
        ("FUSION_PROBE_S", "nan"),
        ("FUSION_PROBE_S", "long"),
        ("FUSION_EMULATE", "{}"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(FusionError, match=variable):
        WorkerSettings.from_environ({variable: value})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_that_are_not_there_are_refused() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    try:
        for cpus in ("4000", f"{core},4000"):
            settings = WorkerSettings.from_environ({"FUSION_CPUS": cpus})
            with pytest.raises(ClusterError, match=f"FUSION_CPUS={cpus}"):
                pin_process(settings)
    finally:
        os.sched_setaffinity(0, before)


def test_a_gpu_that_torch_does_not_see_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert default_device("cpu").type == default_device().type == "cpu"
    assert not caplog.messages
    assert default_device("GPU-1").type == "cpu"
    assert "does not see the device GPU-1" in caplog.text


def test_a_worker_that_lends_a_cpu_leaves_the_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert default_device("cpu").type == "cpu"
    assert default_device("GPU-1").type == "cuda"


def test_lists_of_cores_have_ranges() -> None:
    assert parse_cpus("3,0-1") == {0, 1, 3}
    assert len(parse_cpus("0-99999999999999")) < 1 << 20
    with pytest.raises(ClusterError):
        parse_cpus("")


def test_an_emulation_is_written_and_read() -> None:
    one = Emulation(name="cpu", fraction=0.5, memory_bytes=7, link=None)
    assert Emulation.from_json(one.to_json()) == one


@pytest.mark.parametrize(("said", "expected"), [(None, 7), ("5", 5), ("9", 7)])
def test_no_more_is_lent_than_the_emulated_device_has(said: str | None, expected: int) -> None:
    one = Emulation(name="cpu", fraction=0.5, memory_bytes=7, link=None)
    environ = {"FUSION_EMULATE": one.to_json(), "FUSION_MEMORY_BYTES": said or ""}
    assert WorkerSettings.from_environ(environ).memory_bytes == expected
