"""The catalogue that ships with the product is complete and plausible."""

import pytest

from fusion_dask.planner.catalogue import Gpu, catalogue


def test_it_names_common_gpus_once() -> None:
    names = list(catalogue())
    assert {"rtx3080", "rtx4090", "h100-sxm"} <= set(names)
    assert all(gpu.name == name for name, gpu in catalogue().items())


@pytest.mark.parametrize("gpu", catalogue().values(), ids=lambda gpu: gpu.name)
def test_a_data_sheet_is_plausible(gpu: Gpu) -> None:
    assert 1e12 < gpu.fp32_flops_per_s <= gpu.fp16_flops_per_s < 1e16
    assert 4e9 <= gpu.memory_bytes <= 1e12
    assert 1e11 < gpu.memory_bytes_per_s < 1e13
    assert 50 < gpu.power_w < 1500
    assert gpu.price_usd is None or gpu.price_usd > 100
    assert gpu.has_bf16 == (gpu.architecture != "Turing")


def test_it_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        catalogue()["mine"] = catalogue()["rtx3080"]  # type: ignore[index]
