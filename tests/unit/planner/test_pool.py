"""Pools as people write them, as files have them, and as the broker knows them."""

from dataclasses import asdict
from typing import Any

import pytest

from fusion_dask.errors import DeviceError, ProfileError
from fusion_dask.planner.catalogue import catalogue
from fusion_dask.planner.link_text import parse_link
from fusion_dask.planner.links import Link, LinkTable
from fusion_dask.planner.pool import (
    ELECTRICITY_USD_PER_KWH,
    LIFE_H,
    data_sheet,
    parse_pool,
    pool_from_json,
)
from fusion_dask.planner.profile import Profile, profile_to_json

SLOW = Link(delay_s=0.02, bytes_per_s=1e6)


def member(name: str, state: str = "active", **changes: Any) -> dict[str, Any]:
    profile = profile_to_json(data_sheet(catalogue()["rtx3090"])) | changes
    return {"name": name, "state": state, "profile": profile, "stages": [], "tokens_per_s": None}


def test_text_counts_scales_and_names() -> None:
    pool = parse_pool("2*rtx3080+RTX4090:0.5+rtx3080")
    assert [w.name for w in pool.workers] == ["rtx3080-0", "rtx3080-1", "rtx4090-0", "rtx3080-2"]
    sheet, half = catalogue()["rtx4090"], pool.workers[2].profile
    assert half.flops_per_s["bfloat16"] == sheet.fp16_flops_per_s / 2
    assert half.flops_per_s["float32"] == sheet.fp32_flops_per_s / 2
    assert half.free_memory_bytes == int(0.9 * sheet.memory_bytes)
    assert pool.workers[2].power_w == sheet.power_w
    assert pool.unpriced == ()


def test_a_price_is_the_card_and_its_electricity() -> None:
    (worker,) = parse_pool("rtx3080").workers
    assert worker.price_per_hour == pytest.approx(
        699 / LIFE_H + 0.320 * ELECTRICITY_USD_PER_KWH, rel=1e-12
    )
    assert parse_pool("rtx3080+a100-80gb-sxm").unpriced == ("a100-80gb-sxm-0",)


def test_a_card_without_bfloat16_has_none() -> None:
    assert "bfloat16" not in data_sheet(catalogue()["rtx2080"]).flops_per_s
    assert "bfloat16" in data_sheet(catalogue()["rtx3080"]).flops_per_s


def test_a_link_is_that_between_two_workers() -> None:
    pool = parse_pool("2*rtx3080+rtx4090@100mbit/60ms", link=SLOW)
    table = LinkTable.of(pool.workers)
    assert table.between(0, 1) == SLOW
    assert table.delay_s[0, 2] == pytest.approx(0.04)
    assert table.bytes_per_s[0, 2] == 1e6


def test_a_file_of_entries() -> None:
    measured = {k: member("w0")[k] for k in ("name", "profile")} | {"price_per_hour": 0.5}
    cards = {"gpu": "rtx3080", "count": 2, "link": "8mbit/20ms", "power_w": 200}
    pool = pool_from_json([cards, measured])
    assert [w.name for w in pool.workers] == ["rtx3080-0", "rtx3080-1", "w0"]
    assert [w.power_w for w in pool.workers] == [200, 200, 350]
    assert pool.workers[2].price_per_hour == 0.5
    assert pool.workers[:2] == tuple(
        type(w)(**(asdict(w) | {"profile": w.profile, "power_w": 200}))
        for w in parse_pool("2*rtx3080", link=SLOW).workers
    )


def test_the_brokers_answer_counts_who_lends() -> None:
    unmeasured = member("new", "probing") | {"profile": None}
    status = {
        "members": [member("a"), member("b", "backup"), member("c", "left"), unmeasured],
        "time": 1.0,
    }
    pool = pool_from_json(status)
    assert [w.name for w in pool.workers] == ["a", "b"]
    assert isinstance(pool.workers[0].profile, Profile)


def test_a_measured_device_is_found_in_the_catalogue() -> None:
    status = [
        {k: m[k] for k in ("name", "profile")}
        for m in (
            member("real", device="NVIDIA GeForce RTX 3080"),
            member("emulated", device="cpu", emulated="rtx4090"),
            member("other", device="Some CPU"),
        )
    ]
    pool = pool_from_json(status)
    assert [w.power_w for w in pool.workers] == [320, 0, 0]
    assert pool.unpriced == ("emulated", "other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("50*rtx3081", "not in the catalogue.*rtx3080"),
        ("0*rtx3080", "give 1 to"),
        ("20000*rtx3080", "give 1 to"),
        ("6000*rtx3080+6000*rtx3090", "at most"),
        ("rtx3080:fast", "form"),
        ("rtx3080:1.1.1", "no number"),
        ("rtx3080:0", "computes nothing"),
        ("rtx3080@fast", "100mbit/20ms"),
        ("", "form"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        parse_pool(text)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (3, "fusion status --json"),
        ("50*rtx3080", "fusion status --json"),
        ([3], "object"),
        ([{"name": "x"}], "a gpu, or a name and a profile"),
        ([{"name": "x", "profile": {}}], "without device"),
        ([{"gpu": "rtx3080", "speed": 1}], "unknown fields: speed"),
        ([{"gpu": "rtx3080", "fraction": "1"}], "no number"),
        ([{"gpu": "rtx3080", "power_w": -1}], "positive"),
        ([{"gpu": "rtx3080", "count": 1.5}], "1.5"),
        ({"members": [member("a"), member("a")]}, "several workers called a"),
    ],
)
def test_a_file_that_cannot_be_is_refused(plain: object, message: str) -> None:
    with pytest.raises((ProfileError, DeviceError), match=message):
        pool_from_json(plain)


@pytest.mark.parametrize("text", ["1gbit", "1/20ms", "0gbit/1ms", "1.1.1gbit/1ms", "1gbit/20s"])
def test_a_link_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="link"):
        parse_link(text)
