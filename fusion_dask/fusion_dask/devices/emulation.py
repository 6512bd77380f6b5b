"""Emulated devices: CPU workers that behave like stated fractions of each other.

    --emulate rtx3080,2*rtx4090:0.5      by the catalogue's fp16 tensor rates, times a fraction
    --emulate cpu:0.125,cpu:0.25,cpu:1   by plain numbers
    --emulate rtx3080@100mbit/20ms       with a link of its own

Speeds keep their ratios and are scaled so that all workers together ask for no more than the cores can
give; memories keep theirs and are scaled to what is available. An emulated worker is slowed down, capped
and delayed; what it computes is the same.

Covers: what was asked for, as records. Not covered: slowing down (`worker/pace.py`), shaping links
(`worker/link.py`).

Invariant: no worker asks for more than one core.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fusion_dask.errors import DeviceError
from fusion_dask.planner.catalogue import catalogue
from fusion_dask.planner.link_text import parse_link

__all__ = ["Emulation", "Shape", "emulations", "parse_shape"]

#: Part of the cores that emulated workers ask for together; the rest is for everything else.
CORES_SHARE: Final = 0.95
#: Part of the available memory that they may fill together.
MEMORY_SHARE: Final = 0.7
ITEM: Final = re.compile(r"(?:(\d+)\*)?([a-z0-9-]+)(?::([0-9.]+))?(?:@(.+))?", re.IGNORECASE)
CPU: Final = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A link to shape: `bytes_per_s` each way, `delay_s` one way."""

    bytes_per_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What a CPU worker pretends to be.

    Attributes:
        name: Of the catalogue, or `cpu`.
        fraction: Of one core's speed, above 0 and at most 1.
        memory_bytes: What it may fill.
        link: How its link is shaped, or None for not at all.
    """

    name: str
    fraction: float
    memory_bytes: int
    link: Shape | None

    def to_json(self) -> str:
        """One line for `FUSION_EMULATE`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Emulation":
        """Read `FUSION_EMULATE`.

        Raises:
            DeviceError: It is malformed.
        """
        try:
            plain: dict[str, Any] = json.loads(text)
            link = plain.pop("link")
            made = cls(**plain, link=None if link is None else Shape(**link))
            whole = isinstance(made.name, str) and isinstance(made.memory_bytes, int)
            fits = whole and 0 < made.fraction <= 1 and made.memory_bytes > 0
            moves = made.link is None or (
                0 < made.link.bytes_per_s < math.inf and 0 <= made.link.delay_s < math.inf
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeviceError(f"FUSION_EMULATE={text!r} cannot be read: {error}") from None
        if not fits or not moves:
            raise DeviceError(
                f"FUSION_EMULATE={text!r}: a fraction is above 0 and at most 1, a memory a number of bytes, "
                "a link has bandwidth and delay"
            )
        return made


def emulations(
    text: str, *, cores: int, available_bytes: int, link: Shape | None = None
) -> list[Emulation]:
    """What `--emulate` asks for.

    >>> [e.fraction for e in emulations("cpu:1,cpu:2,cpu:4", cores=8, available_bytes=10)]
    [0.25, 0.5, 1.0]

    Args:
        text: The option.
        cores: That the workers have together.
        available_bytes: Of the machine's memory.
        link: For those that name none.

    Raises:
        DeviceError: A name is not in the catalogue, or the text is malformed.
    """
    asked = [one for item in text.split(",") for one in _parse(item.strip(), link)]
    fastest = max(speed for _, speed, _ in asked)
    fractions = [speed / fastest for _, speed, _ in asked]
    scale = min(1.0, CORES_SHARE * cores / sum(fractions))
    memories = _memories([name for name, _, _ in asked], available_bytes)
    return [
        Emulation(name=name, fraction=fraction * scale, memory_bytes=memory, link=shape)
        for (name, _, shape), fraction, memory in zip(asked, fractions, memories, strict=True)
    ]


def parse_shape(text: str) -> Shape:
    """A link such as `1gbit/20ms`: bandwidth each way, delay one way.

    >>> parse_shape("100mbit/20ms")
    Shape(bytes_per_s=12500000.0, delay_s=0.02)

    Raises:
        DeviceError: It is not of that form.
    """
    try:
        link = parse_link(text)
    except ValueError as error:
        raise DeviceError(str(error)) from None
    return Shape(bytes_per_s=link.bytes_per_s, delay_s=link.delay_s)


def _parse(item: str, link: Shape | None) -> list[tuple[str, float, Shape | None]]:
    match = ITEM.fullmatch(item)
    if match is None:
        raise DeviceError(
            f"--emulate: {item!r} is not of the form rtx3080, 2*rtx3080 or rtx3080:0.5"
        )
    count, name = int(match[1] or 1), match[2].lower()
    try:
        fraction = float(match[3] or 1)
    except ValueError:
        raise DeviceError(f"--emulate: {match[3]!r} is no number") from None
    if not 0 < fraction < 1e6 or not 0 < count <= 64:
        raise DeviceError(f"--emulate: {item!r} has no speed, or asks for more than 64 workers")
    known: Mapping[str, Any] = catalogue()
    if name != CPU and name not in known:
        raise DeviceError(
            f"--emulate: {name!r} is not in the catalogue; there are cpu, {', '.join(sorted(known))}"
        )
    speed = fraction * (1.0 if name == CPU else known[name].fp16_flops_per_s)
    shape = parse_shape(match[4]) if match[4] else link
    return [(name, speed, shape)] * count


def _memories(names: Sequence[str], available_bytes: int) -> list[int]:
    """Of the catalogue, scaled to fit; a plain CPU gets an equal share."""
    usable = MEMORY_SHARE * available_bytes
    equal = usable / len(names)
    wanted = [equal if n == CPU else float(catalogue()[n].memory_bytes) for n in names]
    scale = min(1.0, usable / sum(wanted))
    return [max(1, int(memory * scale)) for memory in wanted]
