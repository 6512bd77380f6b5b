"""Links as people write them: `1gbit/20ms`, a bandwidth each way and a delay one way.

Invariant: what is not of that form is a ValueError that shows the form.
"""

import re
from typing import Final

from fusion_dask.planner.links import Link

__all__ = ["parse_link", "show_bits_per_s"]

#: Bytes per second.
RATES: Final = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
FORM: Final = re.compile(r"([0-9.]+)(kbit|mbit|gbit)/([0-9.]+)ms")


def parse_link(text: str) -> Link:
    """Read a link.

    >>> parse_link("100mbit/20ms")
    Link(delay_s=0.02, bytes_per_s=12500000.0)

    Raises:
        ValueError: It is not of that form, or has no bandwidth.
    """
    match = FORM.fullmatch(text.strip().lower())
    try:
        assert match is not None
        link = Link(delay_s=float(match[3]) / 1000, bytes_per_s=float(match[1]) * RATES[match[2]])
    except (AssertionError, ValueError):
        raise ValueError(f"the link {text!r} is not of the form 100mbit/20ms") from None
    if link.bytes_per_s <= 0:
        raise ValueError(f"the link {text!r} has no bandwidth")
    return link


def show_bits_per_s(bytes_per_s: float) -> str:
    """A bandwidth for people.

    >>> show_bits_per_s(125e6), show_bits_per_s(1e6)
    ('1 Gbit/s', '8 Mbit/s')
    """
    bits = bytes_per_s * 8
    scaled, unit = (bits / 1e9, "Gbit/s") if bits >= 1e9 else (bits / 1e6, "Mbit/s")
    return f"{scaled:.3g} {unit}"
