"""Profiles outlive the broker; a damaged file harms nobody."""

from pathlib import Path

import pytest

from fusion_dask.broker.archive import keep, recall
from fusion_dask.broker.members import Hello, Members
from fusion_dask.planner.profile import Profile

PROFILE = Profile(
    device="RTX 3080",
    kind="cuda",
    threads=1,
    flops_per_s={"float32": 2e13, "bfloat16": 5e13},
    memory_bytes_per_s=7e11,
    free_memory_bytes=9 << 30,
    measured_at=1.0,
    probe_s=1.0,
)


def test_what_is_kept_is_recalled_as_having_left(tmp_path: Path) -> None:
    hello = Hello(name="a-0", provider="a", device="GPU-1", kind="cuda", backup=False, probes=True)
    pool = Members().joined(hello, "tls://a", now=1.0).profiled("tls://a", PROFILE, now=2.0)
    keep(tmp_path / "profiles", pool.by_name["a-0"])
    (member,) = recall(tmp_path / "profiles")
    assert (member.state, member.hello, member.profile) == ("left", hello, PROFILE)
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["a-0.json"]


def test_a_damaged_file_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"profile": {"device": "x"}}')
    assert recall(tmp_path) == []
    assert "a.json" in caplog.text
    assert "b.json" in caplog.text
