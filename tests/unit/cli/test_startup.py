from pathlib import Path

import pytest

from fusion_dask.config import DASK_CONFIG, as_environment
from fusion_dask.devices.find import Device
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.startup import Machine, Request, Startup, decide
from fusion_tasks import settings

CPU = Device(kind="cpu", id="cpu", name="CPU", index=0, memory_bytes=1)
GPUS = [Device(kind="cuda", id=f"GPU-{i}", name="RTX", index=i, memory_bytes=1) for i in range(3)]
MACHINE = Machine(cores=[0, 1, 2, 3], cpu=CPU, gpus=[], free_ports=(7001, 7002))
HOME = {"FUSION_HOME": "/home/of/fusion"}


def startup(request: Request, environ: dict[str, str] | None = None) -> Startup:
    return decide(request, HOME | (environ or {}), MACHINE)


def test_everything_is_embedded_by_default() -> None:
    made = startup(Request(target="x"))
    assert (made.cluster, made.scheduler_port) == ("tcp://127.0.0.1:7001", 7001)
    assert (made.prefect_url, made.prefect_port) == ("http://127.0.0.1:7002/api", 7002)
    assert [(share.cores, share.threads) for share in made.shares] == [((0, 1), 2), ((2, 3), 2)]
    assert made.environment["FUSION_STORE"] == "/home/of/fusion/store"
    assert made.prefect_home == Path("/home/of/fusion/prefect")
    assert made.environment["HF_HUB_OFFLINE"] == "1"
    assert as_environment().items() <= made.environment.items()


def test_an_argument_beats_the_environment_which_beats_the_default() -> None:
    environ = {"FUSION_CLUSTER": "tcp://a:1", "FUSION_STORE": "/s", "PREFECT_API_URL": "http://p"}
    made = startup(Request(target="x"), environ)
    assert (made.cluster, made.scheduler_port, made.shares) == ("tcp://a:1", None, ())
    assert (made.prefect_url, made.prefect_port) == ("http://p", None)
    assert made.environment["FUSION_STORE"] == "/s"
    asked = Request(target="x", cluster="tcp://b:2", store="s3://t", prefect_port=9)
    made = startup(asked, environ)
    assert made.cluster == made.environment["FUSION_CLUSTER"] == "tcp://b:2"
    assert made.prefect_url == made.environment["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
    assert made.environment["FUSION_STORE"] == "s3://t"


def test_asking_for_workers_means_a_cluster_of_our_own() -> None:
    made = startup(Request(target="x", workers=3), {"FUSION_CLUSTER": "tcp://a:1"})
    assert made.scheduler_port == 7001
    assert len(made.shares) == 3


def test_a_cluster_and_workers_exclude_each_other() -> None:
    with pytest.raises(InputError, match="--workers is for a cluster that this command starts"):
        startup(Request(target="x", cluster="tcp://a:1", workers=3))


def test_what_a_person_has_set_stays_and_a_proxy_is_for_others() -> None:
    environ = {"HF_HUB_OFFLINE": "0", "PREFECT_LOGGING_LEVEL": "DEBUG", "no_proxy": "intern"}
    made = startup(Request(target="x"), environ)
    assert made.environment["HF_HUB_OFFLINE"] == "0"
    assert made.environment["PREFECT_LOGGING_LEVEL"] == "DEBUG"
    assert made.environment["NO_PROXY"] == "intern,127.0.0.1,localhost"


def test_one_worker_for_each_gpu() -> None:
    machine = Machine(cores=[0, 1], cpu=CPU, gpus=GPUS, free_ports=(7001, 7002))
    made = decide(Request(target="x"), HOME, machine)
    chosen = [share.as_environment()["CUDA_VISIBLE_DEVICES"] for share in made.shares]
    assert chosen == ["GPU-0", "GPU-1", "GPU-2"]


def test_dask_settings_exist_in_dask() -> None:
    import dask
    import distributed  # noqa: F401 - brings the defaults

    for key in DASK_CONFIG:
        assert dask.config.get(key, default="unknown") != "unknown", key


def test_the_default_home_follows_xdg() -> None:
    found = settings.current({"XDG_DATA_HOME": "/x", "FUSION_CLUSTER": ""})
    assert (found.home, found.store, found.cluster) == (Path("/x/fusion"), "/x/fusion/store", None)
