"""What was measured on a worker: the profile, and its JSON form.

Covers: the frozen records and reading and writing them. Not covered: measuring (`worker/`), what a
device would do by its data sheet (`catalogue.py`).

Invariant: a profile holds measured numbers only, all finite and positive; what was not measured is
absent, never zero.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, get_args

from fusion_dask.errors import ProfileError

__all__ = ["DeviceKind", "LinkProfile", "Profile", "profile_from_json", "profile_to_json"]

DeviceKind = Literal["cuda", "rocm", "mps", "cpu"]

#: Names of the links of every worker; links to peers carry the peer's worker name.
BROKER: Final = "broker"
STORE: Final = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """A link from this worker to somebody else, in the alpha-beta model: delay_s + bytes / rate.

    Attributes:
        delay_s: One way; half of the smallest round trip seen.
        send_bytes_per_s: From here to there, payload only.
        receive_bytes_per_s: From there to here.
    """

    delay_s: float
    send_bytes_per_s: float
    receive_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measured hardware performance of one worker.

    Attributes:
        device: Model name, such as `NVIDIA GeForce RTX 3080` or that of the CPU.
        kind: What drives it.
        threads: Kernel threads of the worker while it was measured.
        flops_per_s: dtype (`float32`, `bfloat16`, ...) -> sustained rate of a large matrix product,
            2·m·n·k operations counted.
        memory_bytes_per_s: Sustained read + write rate of device memory.
        free_memory_bytes: What a stage may fill: measured free, less what the provider keeps.
        host_to_device_bytes_per_s: None where the device computes in host memory.
        device_to_host_bytes_per_s: The same.
        disk_write_bytes_per_s: To the worker's local folder, flushed.
        disk_read_bytes_per_s: From it; by the page cache's leave.
        links: `broker`, `store` or the worker name of a peer -> link.
        efficiency: Rate of real stages over `flops_per_s`, as an exponentially weighted mean; None
            before the first one.
        emulated: Catalogue name that this worker behaves like, or None for a real device.
        measured_at: Unix time in seconds.
        probe_s: How long the probe took.
    """

    device: str
    kind: DeviceKind
    threads: int
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    free_memory_bytes: int
    host_to_device_bytes_per_s: float | None = None
    device_to_host_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    links: Mapping[str, LinkProfile] = field(default_factory=dict)
    efficiency: float | None = None
    emulated: str | None = None
    measured_at: float
    probe_s: float


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """Plain data that `profile_from_json` reads back; finite numbers, strings and None."""
    return asdict(profile)


def profile_from_json(plain: Mapping[str, Any]) -> Profile:
    """Read and check a profile that came from elsewhere.

    >>> profile_from_json({"device": "cpu"})
    Traceback (most recent call last):
    ...
    fusion_dask.errors.ProfileError: a profile without kind, threads, flops_per_s, ...

    Raises:
        ProfileError: A field is missing, unknown, of the wrong type, not finite or not positive.
    """
    fields = set(Profile.__dataclass_fields__)
    required = [
        name for name in Profile.__dataclass_fields__ if name not in _OPTIONAL and name not in plain
    ]
    if required:
        raise ProfileError(f"a profile without {', '.join(required[:3])}, ...")
    if unknown := sorted(set(plain) - fields):
        raise ProfileError(f"a profile with unknown fields: {', '.join(unknown)}")
    if plain["kind"] not in get_args(DeviceKind):
        raise ProfileError(f"a profile of the unknown kind {plain['kind']!r}")
    numbers = {
        name: _positive(name, plain[name]) for name in _NUMBERS if plain.get(name) is not None
    }
    return Profile(
        device=_text("device", plain["device"]),
        kind=plain["kind"],
        threads=_whole("threads", numbers.pop("threads")),
        free_memory_bytes=_whole("free_memory_bytes", numbers.pop("free_memory_bytes")),
        flops_per_s={
            _text("dtype", dtype): _positive(dtype, rate)
            for dtype, rate in _mapping("flops_per_s", plain["flops_per_s"]).items()
        },
        links={
            _text("link", name): _link(name, link)
            for name, link in _mapping("links", plain.get("links", {})).items()
        },
        emulated=None if plain.get("emulated") is None else _text("emulated", plain["emulated"]),
        **numbers,
    )


_NUMBERS: Final = (
    "threads",
    "free_memory_bytes",
    "memory_bytes_per_s",
    "host_to_device_bytes_per_s",
    "device_to_host_bytes_per_s",
    "disk_write_bytes_per_s",
    "disk_read_bytes_per_s",
    "efficiency",
    "measured_at",
    "probe_s",
)
_OPTIONAL: Final = frozenset(
    {
        "host_to_device_bytes_per_s",
        "device_to_host_bytes_per_s",
        "disk_write_bytes_per_s",
        "disk_read_bytes_per_s",
        "links",
        "efficiency",
        "emulated",
    }
)


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"a profile with {name} = {value!r}, which is no number")
    if not math.isfinite(value) or value <= 0:
        raise ProfileError(f"a profile with {name} = {value!r}, which is not finite and positive")
    return float(value)


def _whole(name: str, value: float) -> int:
    if value < 1:
        raise ProfileError(f"a profile with {name} = {value!r}, which is less than 1")
    return int(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ProfileError(
            f"a profile with {name} = {value!r}, which is no text of 1 to 200 letters"
        )
    return value


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ProfileError(f"a profile with {name} = {value!r}, which is no mapping")
    return value


def _link(name: str, plain: object) -> LinkProfile:
    values = _mapping(name, plain)
    if set(values) != set(LinkProfile.__dataclass_fields__):
        raise ProfileError(f"a profile whose link to {name} has the fields {sorted(values)}")
    return LinkProfile(**{key: _positive(f"{name}.{key}", value) for key, value in values.items()})
