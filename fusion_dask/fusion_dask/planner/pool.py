"""Pools to plan for: as people write them, as a file says, or as the broker knows them.

    50*rtx3080                           from the catalogue
    2*rtx3080+rtx4090:0.5                the second one at half its speed
    8*rtx3080@1gbit/5ms+4*rtx4090        some with a link of their own

A file is JSON: what `fusion status --json` prints, or a list of
`{"gpu": "rtx3080", "count": 50, "link": "1gbit/20ms"}` and `{"name": ..., "profile": {...}}`; both take
`price_per_hour` in US dollars and `power_w`.

What the catalogue's data sheets stand for: the rates of `Profile` are the peaks, of which the cost model
takes its usual efficiency; `USABLE` of the memory is free. A link `rate/delay` is rate each way, and delay
between two workers with that link, one way: half of it at either end. Where none is given, the links are
those of `links.UNKNOWN`.

Prices are assumptions, unless the file has them: the launch price over `LIFE_H` hours, and electricity for
the board at its full power. Hosts are not counted. Where the maker names no price, or the device is not in
the catalogue, there is none.

Covers: text and JSON to workers. Not covered: reading files, asking a broker.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fusion_dask.errors import DeviceError, ProfileError
from fusion_dask.planner.catalogue import Gpu, catalogue
from fusion_dask.planner.link_text import parse_link
from fusion_dask.planner.links import Link
from fusion_dask.planner.profile import BROKER, LinkProfile, Profile, profile_from_json
from fusion_dask.planner.records import PoolWorker

__all__ = ["Pool", "data_sheet", "parse_pool", "pool_from_json", "price_per_hour"]

#: Part of a device's memory that a stage may fill; the probe leaves as much.
USABLE: Final = 0.9
#: Three years of continuous use.
LIFE_H: Final = 3 * 365.25 * 24
ELECTRICITY_USD_PER_KWH: Final = 0.15
MOST_WORKERS: Final = 10_000

ITEM: Final = re.compile(r"(?:(\d+)\*)?([a-z0-9-]+)(?::([0-9.]+))?(?:@(.+))?", re.IGNORECASE)
MAKERS: Final = re.compile(r"nvidia|geforce|\s")
ENTRY_KEYS: Final = frozenset({"gpu", "count", "fraction", "link", "price_per_hour", "power_w"})
MEASURED_KEYS: Final = frozenset({"name", "profile", "price_per_hour", "power_w"})
#: States of a member that a stage can be given to.
LENDING: Final = frozenset({"active", "backup"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers, and what is not known of them.

    Attributes:
        workers: With different names.
        unpriced: Names of those whose price is unknown; `PoolWorker.price_per_hour` is 0 there.
    """

    workers: tuple[PoolWorker, ...]
    unpriced: tuple[str, ...]


def price_per_hour(gpu: Gpu) -> float | None:
    """US dollars for an hour of use at full power, or None without a launch price."""
    if gpu.price_usd is None:
        return None
    return gpu.price_usd / LIFE_H + gpu.power_w / 1000 * ELECTRICITY_USD_PER_KWH


def data_sheet(gpu: Gpu, *, fraction: float = 1.0, link: Link | None = None) -> Profile:
    """What would be measured on a device that keeps its data sheet.

    Args:
        gpu: The data sheet.
        fraction: Of its speed; the memory is whole.
        link: Of the worker; None where nothing is known.
    """
    half = gpu.fp16_flops_per_s * fraction
    rates = {"float32": gpu.fp32_flops_per_s * fraction, "float16": half}
    return Profile(
        device=gpu.name,
        kind="cuda",
        threads=1,
        flops_per_s=rates | ({"bfloat16": half} if gpu.has_bf16 else {}),
        memory_bytes_per_s=gpu.memory_bytes_per_s * fraction,
        free_memory_bytes=int(gpu.memory_bytes * USABLE),
        links={} if link is None else {BROKER: _half(link)},
        measured_at=1.0,
        probe_s=1.0,
    )


def parse_pool(text: str, *, link: Link | None = None) -> Pool:
    """Read a pool such as `2*rtx3080+rtx4090:0.5`.

    >>> [w.name for w in parse_pool("2*rtx3080+rtx4090:0.5").workers]
    ['rtx3080-0', 'rtx3080-1', 'rtx4090-0']

    Args:
        text: The pool.
        link: Of those that name none.

    Raises:
        DeviceError: A name is not in the catalogue, or the text is malformed.
    """
    return _numbered([_item(part.strip(), link) for part in text.split("+")])


def pool_from_json(plain: object, *, link: Link | None = None) -> Pool:
    """Read the content of a file, or the broker's answer.

    Args:
        plain: JSON.
        link: Of catalogue entries that name none. Of measured workers their own links count.

    Raises:
        DeviceError: A name is not in the catalogue, or a count, speed or link is impossible.
        ProfileError: A measured worker's entry is incomplete or impossible.
    """
    if isinstance(plain, Mapping) and isinstance(plain.get("members"), Sequence):
        members = [m for m in plain["members"] if _can_lend(m)]
        return _joined([_measured({k: m[k] for k in ("name", "profile")}) for m in members])
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise ProfileError(
            "a pool is the output of `fusion status --json`, or a list of entries with a gpu or a "
            "name and a profile"
        )
    parts = []
    for entry in plain:
        if not isinstance(entry, Mapping):
            raise ProfileError(f"an entry of a pool is an object, not {entry!r}")
        parts.append(_entry(entry, link) if "gpu" in entry else _measured(entry))
    named = _numbered([p for p in parts if isinstance(p, _Several)])
    measured = _joined([p for p in parts if isinstance(p, Pool)])
    return _joined([named, measured])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Several:
    """Equal workers that have no names yet; a price of None is unknown."""

    prefix: str
    count: int
    profile: Profile
    price_per_hour: float | None
    power_w: float


def _numbered(parts: Sequence[_Several]) -> Pool:
    if sum(p.count for p in parts) > MOST_WORKERS:
        raise DeviceError(f"a pool has at most {MOST_WORKERS} workers")
    next_number: Counter[str] = Counter()
    workers, unpriced = [], []
    for part in parts:
        for _ in range(part.count):
            name = f"{part.prefix}-{next_number[part.prefix]}"
            next_number[part.prefix] += 1
            workers.append(
                PoolWorker(
                    name=name,
                    profile=part.profile,
                    price_per_hour=part.price_per_hour or 0.0,
                    power_w=part.power_w,
                )
            )
            if part.price_per_hour is None:
                unpriced.append(name)
    return Pool(workers=tuple(workers), unpriced=tuple(unpriced))


def _joined(pools: Sequence[Pool]) -> Pool:
    workers = tuple(w for p in pools for w in p.workers)
    twice = [name for name, times in Counter(w.name for w in workers).items() if times > 1]
    if twice:
        raise ProfileError(f"the pool has several workers called {twice[0]}; give them other names")
    return Pool(workers=workers, unpriced=tuple(n for p in pools for n in p.unpriced))


def _item(item: str, link: Link | None) -> _Several:
    match = ITEM.fullmatch(item)
    if match is None:
        raise DeviceError(
            f"--pool: {item!r} is not of the form rtx3080, 50*rtx3080 or rtx4090:0.5@1gbit/20ms"
        )
    entry = {"gpu": match[2], "count": int(match[1] or 1), "fraction": match[3], "link": match[4]}
    try:
        entry["fraction"] = float(match[3] or 1)
    except ValueError:
        raise DeviceError(f"--pool: {match[3]!r} is no number") from None
    return _entry({k: v for k, v in entry.items() if v is not None}, link)


def _entry(entry: Mapping[str, Any], link: Link | None) -> _Several:
    if unknown := sorted(set(entry) - ENTRY_KEYS):
        raise DeviceError(f"an entry of a pool with unknown fields: {', '.join(unknown)}")
    name, count = str(entry["gpu"]).lower(), entry.get("count", 1)
    if name not in catalogue():
        raise DeviceError(
            f"{name!r} is not in the catalogue of GPUs; there are {', '.join(sorted(catalogue()))}"
        )
    if not isinstance(count, int) or not 0 < count <= MOST_WORKERS:
        raise DeviceError(f"{count!r} workers of {name}: give 1 to {MOST_WORKERS}")
    fraction = _or(_number(entry, "fraction"), 1.0)
    if fraction == 0:
        raise DeviceError(f"{name} with fraction 0 computes nothing")
    if "link" in entry:
        try:
            link = parse_link(str(entry["link"]))
        except ValueError as error:
            raise DeviceError(str(error)) from None
    gpu = catalogue()[name]
    price = _number(entry, "price_per_hour")
    return _Several(
        prefix=name,
        count=count,
        profile=data_sheet(gpu, fraction=fraction, link=link),
        price_per_hour=price_per_hour(gpu) if price is None else price,
        power_w=_or(_number(entry, "power_w"), gpu.power_w),
    )


def _measured(entry: Mapping[str, Any]) -> Pool:
    if unknown := sorted(set(entry) - MEASURED_KEYS):
        raise ProfileError(f"an entry of a pool with unknown fields: {', '.join(unknown)}")
    if not isinstance(entry.get("profile"), Mapping) or not isinstance(entry.get("name"), str):
        raise ProfileError("an entry of a pool has a gpu, or a name and a profile")
    profile = profile_from_json(entry["profile"])
    known = _gpu_of(profile)
    price = _number(entry, "price_per_hour")
    if price is None and known is not None:
        price = price_per_hour(known)
    worker = PoolWorker(
        name=entry["name"],
        profile=profile,
        price_per_hour=price or 0.0,
        power_w=_or(_number(entry, "power_w"), 0.0 if known is None else known.power_w),
    )
    return Pool(workers=(worker,), unpriced=(worker.name,) if price is None else ())


def _number(entry: Mapping[str, Any], key: str) -> float | None:
    """A number that may be absent; finite and not negative."""
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"an entry of a pool with {key} = {value!r}, which is no number")
    if not 0 <= value < math.inf:
        raise ProfileError(f"an entry of a pool with {key} = {value!r}: give one that is positive")
    return float(value)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _gpu_of(profile: Profile) -> Gpu | None:
    """The data sheet of a measured device, by its name; an emulated one neither costs nor draws that."""
    if profile.emulated is not None:
        return None
    return catalogue().get(MAKERS.sub("", profile.device.lower()))


def _can_lend(member: object) -> bool:
    return (
        isinstance(member, Mapping)
        and member.get("state") in LENDING
        and member.get("profile") is not None
        and "name" in member
    )


def _half(link: Link) -> LinkProfile:
    """One end of a link."""
    rate = link.bytes_per_s
    return LinkProfile(delay_s=link.delay_s / 2, send_bytes_per_s=rate, receive_bytes_per_s=rate)
