"""Who leaves the pool and comes back, and when: traces, recorded or drawn.

Drawn: each worker stays for an exponential time of mean 1 / rate, then is away for an exponential time of
mean `away_s`, on and on. Its times depend on the seed and its name alone, so that another worker's presence
does not change them.

Recorded: JSON, a list of `{"at_s": 120.5, "worker": "rtx3080-3", "event": "quit"}`, or "join".

Invariant: a trace is ordered, and the same seed gives the same trace.
"""

import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fusion_dask.errors import PlanError

__all__ = ["Change", "away_share", "drawn_trace", "parse_rate", "trace_from_json"]

HOUR_S: Final = 3600.0
EVENTS: Final = {"quit": False, "join": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A worker joins or leaves."""

    at_s: float
    worker: str
    joins: bool


def parse_rate(text: str) -> float:
    """How often each worker leaves, per second.

    >>> parse_rate("0.1/h") * 3600
    0.1

    Raises:
        PlanError: It is not of that form.
    """
    match = re.fullmatch(r"([0-9.]+)/h", text.strip().lower())
    try:
        assert match is not None
        return float(match[1]) / HOUR_S
    except (AssertionError, ValueError):
        raise PlanError(
            f"--churn {text!r} is not of the form 0.1/h, how often each worker leaves, or a .json file "
            "with a trace"
        ) from None


def away_share(rate_per_s: float, away_s: float) -> float:
    """Share of the workers that are away on average."""
    return rate_per_s * away_s / (1 + rate_per_s * away_s)


def drawn_trace(
    workers: Sequence[str], rate_per_s: float, *, away_s: float, until_s: float, seed: int
) -> tuple[Change, ...]:
    """Draw a trace; everybody is there at the start.

    Args:
        workers: Their names.
        rate_per_s: How often each leaves.
        away_s: Mean time until one is back.
        until_s: Last moment of the trace.
        seed: Of the random numbers.
    """
    if rate_per_s == 0:
        return ()
    changes = [
        change
        for name in workers
        for change in _one(name, rate_per_s, away_s, until_s, random.Random(f"{seed}:{name}"))
    ]
    return tuple(sorted(changes, key=lambda c: (c.at_s, c.worker)))


def trace_from_json(plain: object, workers: Collection[str]) -> tuple[Change, ...]:
    """Read a recorded trace.

    Args:
        plain: JSON.
        workers: Names that may occur in it.

    Raises:
        PlanError: It is malformed, or names a worker that is not in the pool.
    """
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise PlanError('a trace is a list of {"at_s": 60, "worker": "rtx3080-0", "event": "quit"}')
    changes = [_change(entry, workers) for entry in plain]
    return tuple(sorted(changes, key=lambda c: c.at_s))


def _one(
    name: str, rate_per_s: float, away_s: float, until_s: float, source: random.Random
) -> Iterator[Change]:
    now_s, joins = 0.0, False
    while True:
        now_s += source.expovariate(1 / away_s if joins else rate_per_s)
        if now_s > until_s:
            return
        yield Change(at_s=now_s, worker=name, joins=joins)
        joins = not joins


def _change(entry: object, workers: Collection[str]) -> Change:
    if not isinstance(entry, Mapping) or set(entry) != {"at_s", "worker", "event"}:
        raise PlanError(f"an entry of a trace has at_s, worker and event, not {entry!r}")
    plain: Mapping[str, Any] = entry
    at_s, worker, event = plain["at_s"], plain["worker"], plain["event"]
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < math.inf:
        raise PlanError(f"a trace with at_s = {at_s!r}: give seconds from the start")
    if worker not in workers:
        raise PlanError(f"a trace of {worker!r}, who is not in the pool")
    if event not in EVENTS:
        raise PlanError(f"a trace with the event {event!r}: give quit or join")
    return Change(at_s=float(at_s), worker=worker, joins=EVENTS[event])
