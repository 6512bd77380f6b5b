"""The profile as a record from elsewhere: read back, or refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.errors import ProfileError
from fusion_dask.planner.profile import (
    LinkProfile,
    Profile,
    profile_from_json,
    profile_to_json,
)

RATE = st.floats(1e-6, 1e18)
BYTES = st.integers(1, 1 << 50)
NAME = st.text(min_size=1, max_size=200)
LINK = st.builds(LinkProfile, delay_s=RATE, send_bytes_per_s=RATE, receive_bytes_per_s=RATE)
PROFILES = st.builds(
    Profile,
    device=NAME,
    kind=st.sampled_from(["cuda", "rocm", "mps", "cpu"]),
    threads=st.integers(1, 512),
    flops_per_s=st.dictionaries(st.sampled_from(["float32", "bfloat16"]), RATE),
    memory_bytes_per_s=RATE,
    free_memory_bytes=BYTES,
    host_to_device_bytes_per_s=st.none() | RATE,
    device_to_host_bytes_per_s=st.none() | RATE,
    disk_write_bytes_per_s=st.none() | RATE,
    disk_read_bytes_per_s=st.none() | RATE,
    links=st.dictionaries(NAME, LINK, max_size=3),
    efficiency=st.none() | RATE,
    emulated=st.none() | NAME,
    measured_at=RATE,
    probe_s=RATE,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(PROFILES)
def test_a_profile_survives_json(profile: Profile) -> None:
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile)))) == profile


@given(PROFILES, st.data())
def test_a_field_of_anything_is_read_or_refused(profile: Profile, data: st.DataObject) -> None:
    plain = profile_to_json(profile)
    name = data.draw(st.sampled_from(sorted(plain)))
    plain[name] = data.draw(JSON)
    try:
        read = profile_from_json(plain)
    except ProfileError:
        return
    assert profile_from_json(profile_to_json(read)) == read


@given(PROFILES, st.data())
def test_a_profile_that_lacks_a_field_or_has_another_is_refused(
    profile: Profile, data: st.DataObject
) -> None:
    required = ("device", "kind", "threads", "flops_per_s", "measured_at", "probe_s")
    plain = profile_to_json(profile)
    del plain[data.draw(st.sampled_from(required))]
    with pytest.raises(ProfileError, match="without"):
        profile_from_json(plain)
    with pytest.raises(ProfileError, match="unknown"):
        profile_from_json({**profile_to_json(profile), "colour": "red"})


PLAIN = {
    "device": "CPU",
    "kind": "cpu",
    "threads": 1,
    "flops_per_s": {"float32": 1.0},
    "memory_bytes_per_s": 1.0,
    "free_memory_bytes": 1,
    "measured_at": 1.0,
    "probe_s": 1.0,
}


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "1"])
def test_a_rate_is_finite_and_positive(value: Any) -> None:
    with pytest.raises(ProfileError, match="float32"):
        profile_from_json({**PLAIN, "flops_per_s": {"float32": value}})


@pytest.mark.parametrize("name", ["threads", "free_memory_bytes"])
def test_a_part_of_a_thread_or_byte_is_refused(name: str) -> None:
    assert profile_from_json({**PLAIN, name: 2.0})
    with pytest.raises(ProfileError, match=name):
        profile_from_json({**PLAIN, name: 0.5})
