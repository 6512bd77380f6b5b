"""When a process that ended is started again: pure, state + event -> state.

Used for the services of a broker and the workers of a provider. Waiting times double from `first_s` to
`longest_s` while a process keeps ending soon, and begin anew once it has run for `steady_s`.

Invariant: nothing is started more often than once in `first_s`.
"""

from dataclasses import dataclass, replace

__all__ = ["Backoff", "Restarts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """A policy, in seconds; up to `spread` of a waiting time is added to it by chance."""

    first_s: float = 1.0
    longest_s: float = 60.0
    steady_s: float = 60.0
    spread: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """The history of one process; times are of a monotonic clock.

    >>> r = Restarts(policy=Backoff()).started(0.0).ended(1.0)
    >>> r.due_at, r.started(2.0).ended(3.0).due_at
    (2.0, 5.0)
    """

    policy: Backoff
    soon: int = 0
    started_at: float | None = None
    due_at: float | None = 0.0

    def started(self, now: float) -> "Restarts":
        """It runs."""
        return replace(self, started_at=now, due_at=None)

    def ended(self, now: float, *, chance: float = 0.0) -> "Restarts":
        """It ended, and is due again at `due_at`.

        Args:
            now: Monotonic seconds.
            chance: A random number from 0 to 1.
        """
        began = now if self.started_at is None else self.started_at
        soon = 1 if now - began >= self.policy.steady_s else self.soon + 1
        wait_s = min(self.policy.longest_s, self.policy.first_s * 2.0 ** (min(soon, 32) - 1))
        wait_s *= 1.0 + self.policy.spread * chance
        return replace(self, soon=soon, started_at=None, due_at=now + wait_s)

    def is_due(self, now: float) -> bool:
        """Whether it should be started now."""
        return self.due_at is not None and now >= self.due_at
