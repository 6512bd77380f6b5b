"""What the provider's supervisor does next: pure, state + observation -> state + actions.

While the machine is lent, every worker runs, and one that ended is started again with back-off. Outside
of the hours, and after the person said so, the broker is asked to take nothing new and workers end as
soon as they hold no stage and run no task. If it is lent again meanwhile they leave all the same, since
the broker has already written them off, and then all start anew.

Invariant: a worker that is busy is ended only if the broker has not answered for `PATIENCE_S`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from fusion_flows.cli.pool.restart import Restarts

__all__ = ["Act", "Lending", "Seen"]

#: A scheduler that is busy with something long was silent for 5.2 s once.
PATIENCE_S: Final = 10.0
#: A worker that was told to end is killed after this.
GRACE_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the driver has seen.

    Attributes:
        now: Monotonic seconds.
        wanted: Whether the machine is lent now.
        ended: Workers that have ended since the last look.
        busy: By worker, whether it is needed; None when the broker was not asked or did not answer.
        chance: A random number from 0 to 1; it keeps many machines from coming back all at once.
    """

    now: float
    wanted: bool
    ended: frozenset[str] = frozenset()
    busy: Mapping[str, bool] | None = None
    chance: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Something to do with one worker: start it, tell it to end, or kill it."""

    what: Literal["start", "end", "kill"]
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """The workers of this machine.

    Attributes:
        history: Of every worker, when it was started and is due again.
        running: Those that run.
        leaving: Those of them that are given back: each ends when it is free.
        ending: Those of them that were told to end, and when.
        silent_since: When the broker left the first of the last questions without an answer.
    """

    history: Mapping[str, Restarts]
    running: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    ending: Mapping[str, float] = field(default_factory=dict)
    silent_since: float | None = None

    def after(self, seen: Seen) -> tuple["Lending", list[Act]]:
        """The next state, and what to do."""
        state, killed = self._without(seen)._kill(seen)
        if not seen.wanted:
            state = replace(state, leaving=state.running)
        if state.leaving or not seen.wanted:
            state, acts = state._end(seen)
        else:
            state, acts = replace(state, silent_since=None)._start(seen)
        return state, [*killed, *acts]

    def _without(self, seen: Seen) -> "Lending":
        history = dict(self.history)
        for worker in seen.ended & self.running:
            history[worker] = history[worker].ended(seen.now, chance=seen.chance)
        return replace(
            self,
            history=history,
            running=self.running - seen.ended,
            leaving=self.leaving - seen.ended,
            ending={w: since for w, since in self.ending.items() if w not in seen.ended},
        )

    def _kill(self, seen: Seen) -> tuple["Lending", list[Act]]:
        """End for good who was told to and does not: Dask's closing can wait for itself."""
        stuck = [w for w, since in self.ending.items() if seen.now - since >= GRACE_S]
        again = {**self.ending, **dict.fromkeys(stuck, seen.now)}
        return replace(self, ending=again), [Act(what="kill", worker=worker) for worker in stuck]

    def _start(self, seen: Seen) -> tuple["Lending", list[Act]]:
        due = [
            worker
            for worker, restarts in self.history.items()
            if worker not in self.running and restarts.is_due(seen.now)
        ]
        history = {w: r.started(seen.now) if w in due else r for w, r in self.history.items()}
        state = replace(self, history=history, running=self.running | set(due))
        return state, [Act(what="start", worker=worker) for worker in due]

    def _end(self, seen: Seen) -> tuple["Lending", list[Act]]:
        busy, silent_since = seen.busy, None
        if busy is None:
            silent_since = seen.now if self.silent_since is None else self.silent_since
            is_lost = seen.now - silent_since >= PATIENCE_S
            busy = dict.fromkeys(self.leaving, not is_lost)
        # A worker that the broker does not know holds nothing.
        free = [w for w in sorted(self.leaving - self.ending.keys()) if not busy.get(w, False)]
        ending = {**self.ending, **dict.fromkeys(free, seen.now)}
        state = replace(self, ending=ending, silent_since=silent_since)
        return state, [Act(what="end", worker=worker) for worker in free]
