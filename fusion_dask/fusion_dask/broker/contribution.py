"""What each worker contributes to a run, in tokens per second: pure, state + event -> state.

A stage's share of a step's tokens is its share of the step's FLOPs, so the contributions of a run's
workers add up to the run's tokens/s.

Invariant: a run that has not finished a step contributes nothing yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Contributions", "Load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run's steps cost.

    Attributes:
        tokens_per_step: Tokens in a global batch.
        flops: Of each stage, forward and backward, for one microbatch.
    """

    tokens_per_step: int
    flops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    load: Load
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """The load and the last step time of every run.

    >>> c = Contributions().placed("r", Load(tokens_per_step=100, flops=(1, 3))).stepped("r", 2.0)
    >>> c.tokens_per_s("r", 1)
    37.5
    """

    runs: Mapping[str, _Rate] = field(default_factory=dict)

    def placed(self, run: str, load: Load) -> "Contributions":
        """A run was placed."""
        return replace(self, runs={**self.runs, run: _Rate(load=load)})

    def stepped(self, run: str, step_s: float) -> "Contributions":
        """A run finished a step."""
        rate = self.runs.get(run)
        if rate is None:
            return self
        return replace(self, runs={**self.runs, run: replace(rate, step_s=step_s)})

    def released(self, run: str) -> "Contributions":
        """A run has ended."""
        return replace(self, runs={r: rate for r, rate in self.runs.items() if r != run})

    def tokens_per_s(self, run: str, stage: int) -> float | None:
        """What a stage contributes, or None before the first step."""
        rate = self.runs.get(run)
        if rate is None or not rate.step_s or not sum(rate.load.flops):
            return None
        share = rate.load.flops[stage] / sum(rate.load.flops)
        return rate.load.tokens_per_step * share / rate.step_s
