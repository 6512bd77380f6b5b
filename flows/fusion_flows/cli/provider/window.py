"""The hours in which a machine is lent: pure.

Invariant: a window may cross midnight; its end is not part of it.
"""

import datetime as dt
from dataclasses import dataclass

from fusion_flows.cli.errors import InputError

__all__ = ["Window", "parse_window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From one local time of day to another.

    >>> night = Window(opens=dt.time(22), closes=dt.time(7))
    >>> night.is_open(dt.time(23)), night.is_open(dt.time(6, 59)), night.is_open(dt.time(7))
    (True, True, False)
    """

    opens: dt.time
    closes: dt.time

    def is_open(self, now: dt.time) -> bool:
        """Whether the machine is lent at that time of day."""
        if self.opens < self.closes:
            return self.opens <= now < self.closes
        return now >= self.opens or now < self.closes

    def told(self, *, is_open: bool) -> str:
        """What a person reads when it opens or closes.

        >>> Window(opens=dt.time(22), closes=dt.time(7)).told(is_open=True)
        'lent until 07:00'
        """
        return (
            f"lent until {self.closes:%H:%M}" if is_open else f"not lent until {self.opens:%H:%M}"
        )


def parse_window(text: str) -> Window:
    """Read `22:00-07:00`.

    Raises:
        InputError: It is not of that form, or opens and closes at once.
    """
    opens, _, closes = text.partition("-")
    try:
        window = Window(opens=_time(opens), closes=_time(closes))
    except ValueError:
        raise InputError(f"--lend {text}: hours look like 22:00-07:00") from None
    if window.opens == window.closes:
        raise InputError(f"--lend {text}: it opens and closes at once; leave it away for all day")
    return window


def _time(text: str) -> dt.time:
    return dt.datetime.strptime(text.strip(), "%H:%M").time()
