"""What the provider's supervisor does next: pure, state + observation -> state + actions.

While the machine is lent, every worker runs, and one that ended is started again with back-off. Outside
of the hours, and after the person said so, the broker is asked to take nothing new and workers end as
soon as they hold no stage and run no task.

Invariant: a worker that is busy is ended only if the broker cannot be asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from fusion_flows.cli.pool.restart import Restarts

__all__ = ["Act", "Lending", "Seen"]

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
    """

    now: float
    wanted: bool
    ended: frozenset[str] = frozenset()
    busy: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Something to do with one worker."""

    what: Literal["start", "end", "kill"]
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """The workers of this machine.

    Attributes:
        history: Of every worker, when it was started and is due again.
        running: Those that run.
        ending: Those that were told to end, and when.
    """

    history: Mapping[str, Restarts]
    running: frozenset[str] = field(default_factory=frozenset)
    ending: Mapping[str, float] = field(default_factory=dict)

    def after(self, seen: Seen) -> tuple["Lending", list[Act]]:
        """The next state, and what to do."""
        history = dict(self.history)
        for worker in seen.ended & self.running:
            history[worker] = history[worker].ended(seen.now)
        state = replace(
            self,
            history=history,
            running=self.running - seen.ended,
            ending={w: since for w, since in self.ending.items() if w not in seen.ended},
        )
        state, killed = state._kill(seen)
        state, acts = state._start(seen) if seen.wanted else state._end(seen)
        return state, [*killed, *acts]

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
        def is_free(worker: str) -> bool:
            # A worker that the broker does not know holds nothing.
            return seen.busy is None or not seen.busy.get(worker, False)

        free = [w for w in sorted(self.running - self.ending.keys()) if is_free(w)]
        state = replace(self, ending={**self.ending, **dict.fromkeys(free, seen.now)})
        return state, [Act(what="end", worker=worker) for worker in free]
