"""The catalogue of GPUs: what their makers state.

Sources: the vendors' data sheets and architecture white papers (Turing, Ampere, Ada, Blackwell; Hopper for
H100) for rates, memory, bandwidth, power and launch prices. `fp16_flops_per_s` is the dense tensor peak with
accumulation in fp32, which GeForce cards halve; sparsity is never counted.

Covers: data sheets. Not covered: what a device really does, which is measured (`profile.py`).
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

__all__ = ["Gpu", "catalogue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A data sheet.

    Attributes:
        name: Short name, such as `rtx3080`.
        architecture: The maker's name of it.
        fp16_flops_per_s: Dense fp16 tensor peak, accumulated in fp32.
        fp32_flops_per_s: Peak without tensor cores.
        memory_bytes: Of the device.
        memory_bytes_per_s: Peak.
        pcie: Generation and lanes, such as `4.0x16`.
        power_w: Of the board.
        price_usd: At launch; None where the maker names none.
        has_bf16: Whether tensor cores take bfloat16.
    """

    name: str
    architecture: str
    fp16_flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    pcie: str
    power_w: float
    price_usd: float | None
    has_bf16: bool


@cache
def catalogue() -> Mapping[str, Gpu]:
    """All data sheets by name.

    >>> catalogue()["rtx3080"].fp16_flops_per_s / 1e12
    59.5
    """
    with files("fusion_dask.planner").joinpath("gpus.csv").open() as file:
        return MappingProxyType({row["name"]: _gpu(row) for row in csv.DictReader(file)})


def _gpu(row: Mapping[str, str]) -> Gpu:
    return Gpu(
        name=row["name"],
        architecture=row["architecture"],
        fp16_flops_per_s=float(row["fp16_tensor_tflops_dense_fp32_accumulate"]) * 1e12,
        fp32_flops_per_s=float(row["fp32_tflops"]) * 1e12,
        memory_bytes=int(float(row["memory_gb"]) * 1e9),
        memory_bytes_per_s=float(row["memory_bandwidth_gb_s"]) * 1e9,
        pcie=row["pcie"],
        power_w=float(row["board_power_w"]),
        price_usd=float(row["price_usd"]) if row["price_usd"] else None,
        has_bf16=row["has_bf16"] == "1",
    )
