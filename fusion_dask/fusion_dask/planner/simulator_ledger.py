"""What a simulation has done and used so far: the clock, steps, time, energy, money, bytes, and who was what.

Invariant: the parts of the budget add up to the clock.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from fusion_dask.planner.cost_model import IDLE_SHARE
from fusion_dask.planner.simulator_records import Budget, LinkTraffic, Span
from fusion_dask.planner.simulator_regime import Market, Regime

__all__ = ["Ledger"]


@dataclass(slots=True, kw_only=True)
class _Work:
    """Steps and what they were worth."""

    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    def add(self, other: "_Work") -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.flops += other.flops
        self.seconds += other.seconds


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The books of a simulation.

    Attributes:
        market: What does not change.
        now_s: The clock.
        losses: Stages that were lost.
        replaced: Stages that the backup pool took over.
        replans: Plans made anew.
    """

    market: Market
    now_s: float = 0.0
    losses: int = 0
    replaced: int = 0
    replans: int = 0
    energy_j: float = 0.0
    cost: float = 0.0
    peak_flops: float = 0.0
    store_bytes: float = 0.0
    _kept: _Work = field(default_factory=_Work)
    _open: _Work = field(default_factory=_Work)
    _repeated_s: float = 0.0
    _recovery_s: float = 0.0
    _checkpoints_s: float = 0.0
    _paused_s: float = 0.0
    _traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    _moments: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    @property
    def uncommitted(self) -> int:
        """Steps since the last checkpoint."""
        return self._open.steps

    @property
    def steps(self) -> int:
        """Steps that count."""
        return self._kept.steps + self._open.steps

    @property
    def tokens(self) -> int:
        """In the steps that count."""
        return self._kept.tokens + self._open.tokens

    @property
    def mfu(self) -> float:
        """FLOPs of the steps that count over what everybody in use could have done."""
        done = self._kept.flops + self._open.flops
        return done / self.peak_flops if self.peak_flops else 0.0

    @property
    def budget(self) -> Budget:
        """Where the time went."""
        return Budget(
            steps_s=self._kept.seconds + self._open.seconds,
            repeated_s=self._repeated_s,
            recovery_s=self._recovery_s,
            checkpoints_s=self._checkpoints_s,
            paused_s=self._paused_s,
        )

    def run(self, regime: Regime, steps: int) -> None:
        """Steps without losses."""
        seconds = steps * regime.step_s
        self._open.add(
            _Work(
                steps=steps,
                tokens=steps * regime.tokens,
                flops=steps * regime.step_flops,
                seconds=seconds,
            )
        )
        self.energy_j += steps * regime.step_energy_j
        self.store_bytes += steps * regime.journal_bytes
        for pair, size in regime.sent_bytes.items():
            self._traffic[pair] += steps * size
        self._pass(regime, seconds)

    def recover(self, regime: Regime, until_s: float, *, replayed_j: float = 0.0) -> None:
        """Everybody waits, some fetch and replay.

        Args:
            regime: Who takes part.
            until_s: End of it.
            replayed_j: What the replays need beyond waiting.
        """
        seconds = max(0.0, until_s - self.now_s)
        self._recovery_s += seconds
        self.energy_j += regime.idle_w * seconds + replayed_j
        self._pass(regime, seconds)

    def commit(self, regime: Regime) -> None:
        """A checkpoint: what was done since the last one is safe."""
        self._kept.add(self._open)
        self._open = _Work()
        self._checkpoints_s += regime.commit_s
        self.store_bytes += regime.stored_bytes
        self.energy_j += regime.idle_w * regime.commit_s
        self._pass(regime, regime.commit_s)

    def go_back(self, regime: Regime, at_s: float) -> None:
        """What was done since the last checkpoint is lost, and the step that ran until now."""
        partly_s = max(0.0, at_s - self.now_s)
        self._repeated_s += self._open.seconds + partly_s
        self._open = _Work()
        self.energy_j += regime.step_energy_j * partly_s / regime.step_s
        self._pass(regime, partly_s)

    def pause(self, until_s: float) -> None:
        """Nobody takes part."""
        seconds = max(0.0, until_s - self.now_s)
        self._paused_s += seconds
        self.now_s += seconds

    def replay_j(self, name: str, seconds: float) -> float:
        """What a worker needs for computing so long, beyond waiting."""
        power_w = self.market.pool[self.market.place[name]].power_w
        return (1 - IDLE_SHARE) * power_w * seconds

    def show(self, name: str, state: str, at_s: float | None = None) -> None:
        """A worker is this from a moment on; now by default."""
        at_s = self.now_s if at_s is None else at_s
        moments = self._moments.setdefault(name, [])
        # What was expected of it after that moment does not come true.
        while moments and moments[-1][0] >= at_s:
            moments.pop()
        if not moments or moments[-1][1] != state:
            moments.append((at_s, state))

    def spans(self) -> tuple[Span, ...]:
        """Who was what until now, by worker in the order of the pool."""
        return tuple(
            Span(worker=worker.name, state=state, start_s=start_s, stop_s=min(stop_s, self.now_s))
            for worker in self.market.pool
            for (start_s, state), (stop_s, _) in pairwise(
                [*self._moments.get(worker.name, ()), (self.now_s, "")]
            )
            if min(stop_s, self.now_s) > start_s
        )

    def traffic(self, first: Regime) -> tuple[LinkTraffic, ...]:
        """What went over each link, busiest first."""
        place, rates = self.market.place, self.market.links.bytes_per_s
        found = []
        for (sender, receiver), total in self._traffic.items():
            size = first.sent_bytes.get((sender, receiver), 0)
            rate = float(rates[place[sender], place[receiver]])
            found.append(
                LinkTraffic(
                    sender=sender,
                    receiver=receiver,
                    total_bytes=float(total),
                    step_bytes=float(size),
                    busy=size / rate / first.step_s,
                )
            )
        return tuple(sorted(found, key=lambda x: (-x.busy, place[x.sender], place[x.receiver])))

    def _pass(self, regime: Regime, seconds: float) -> None:
        self.now_s += seconds
        self.cost += regime.price_per_s * seconds
        self.peak_flops += regime.peak_flops_per_s * seconds
