"""The members of a pool as a person reads them.

Covers: one line for a member's profile, and a table of all. Not covered: asking for them (`status.py`).

Invariant: what was not measured is shown as unknown, never as zero.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.table import Table

__all__ = ["describe", "members_table"]

COLOURS: Final = {
    "active": "green",
    "backup": "cyan",
    "probing": "yellow",
    "draining": "yellow",
    "left": "dim",
}
UNKNOWN: Final = "–"


def describe(member: Mapping[str, Any]) -> str:
    """`: device, rate, memory, link`, or nothing before it was measured."""
    profile = member["profile"]
    if profile is None or member["state"] not in {"active", "backup"}:
        return ""
    parts = [_device(profile), _rate(profile), _memory(profile), _link(profile)]
    return ": " + ", ".join(part for part in parts if part != UNKNOWN)


def members_table(status: Mapping[str, Any], *, with_left: bool = True) -> Table:
    """All members of a `fusion_status`."""
    table = Table(
        *("worker", "state", "device", "speed", "memory", "link to broker", "stage", "tokens/s"),
        "since",
    )
    for member in _sorted(status["members"]):
        if member["state"] == "left" and not with_left:
            continue
        profile, colour = member["profile"], COLOURS.get(member["state"], "default")
        stages = ", ".join(f"{held['run']}/{held['stage']}" for held in member["stages"])
        rate = member["tokens_per_s"]
        table.add_row(
            member["name"],
            f"[{colour}]{member['state']}[/]",
            UNKNOWN if profile is None else _device(profile),
            UNKNOWN if profile is None else _rate(profile),
            UNKNOWN if profile is None else _memory(profile),
            UNKNOWN if profile is None else _link(profile),
            stages or UNKNOWN,
            UNKNOWN if rate is None else f"{rate:,.0f}",
            _ago(status["time"] - member["since"]),
        )
    return table


def _sorted(members: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(members, key=lambda m: (m["state"] == "left", len(m["name"]), m["name"]))


def _device(profile: Mapping[str, Any]) -> str:
    name = str(profile["device"])
    return name if profile["emulated"] is None else f"{profile['emulated']} (emulated)"


def _rate(profile: Mapping[str, Any]) -> str:
    """The fastest dtype's."""
    if not profile["flops_per_s"]:
        return UNKNOWN
    dtype, rate = max(profile["flops_per_s"].items(), key=lambda item: item[1])
    scaled, unit = (rate / 1e12, "TFLOP/s") if rate >= 1e12 else (rate / 1e9, "GFLOP/s")
    return f"{scaled:.3g} {unit} {dtype}"


def _memory(profile: Mapping[str, Any]) -> str:
    return f"{profile['free_memory_bytes'] / 1e9:.1f} GB"


def _link(profile: Mapping[str, Any]) -> str:
    link = profile["links"].get("broker")
    if link is None:
        return UNKNOWN
    slower = min(link["send_bytes_per_s"], link["receive_bytes_per_s"]) * 8
    scaled, unit = (slower / 1e9, "Gbit/s") if slower >= 1e9 else (slower / 1e6, "Mbit/s")
    return f"{scaled:.3g} {unit}, {link['delay_s'] * 1e3:.1f} ms"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
