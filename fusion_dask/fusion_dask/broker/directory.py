"""Where the stages of each run are: a pure directory, state + event -> state.

It answers one question, "where is stage s of run r now?", and remembers which stages were lost with
their worker. Nothing here knows Dask or the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Directory", "Placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The stages of one attempt of one run, by the address of their worker."""

    epoch: int
    addresses: Mapping[int, str]
    lost: Mapping[int, str] = field(default_factory=dict)  # stage -> why


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """All placements. Every event gives a new directory.

    >>> d = Directory().placed("r", 1, {0: "tcp://a", 1: "tcp://b"}).worker_lost("tcp://b", "killed")
    >>> d.where("r", 1, 0), d.where("r", 1, 1), d.lost("r")
    ('tcp://a', None, {1: 'killed'})
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)

    def placed(self, run: str, epoch: int, addresses: Mapping[int, str]) -> "Directory":
        """A run was placed; an older epoch than the known one changes nothing."""
        known = self.placements.get(run)
        if known is not None and known.epoch > epoch:
            return self
        placement = Placement(epoch=epoch, addresses=dict(addresses))
        return replace(self, placements={**self.placements, run: placement})

    def released(self, run: str) -> "Directory":
        """A run has ended."""
        return replace(self, placements={r: p for r, p in self.placements.items() if r != run})

    def worker_lost(self, address: str, reason: str) -> "Directory":
        """A worker left; every stage that it held is lost."""
        return replace(
            self,
            placements={
                run: replace(
                    p,
                    lost={**p.lost, **{s: reason for s, a in p.addresses.items() if a == address}},
                )
                for run, p in self.placements.items()
            },
        )

    def where(self, run: str, epoch: int, stage: int) -> str | None:
        """Address of a stage's worker; None if the stage is lost or not placed in this epoch."""
        placement = self.placements.get(run)
        if placement is None or placement.epoch != epoch or stage in placement.lost:
            return None
        return placement.addresses.get(stage)

    def lost(self, run: str) -> Mapping[int, str]:
        """The lost stages of a run, with the reason."""
        placement = self.placements.get(run)
        return {} if placement is None else placement.lost

    def held_by(self, address: str) -> list[tuple[str, int]]:
        """Run and index of every stage that is placed on a worker."""
        return [
            (run, stage)
            for run, placement in self.placements.items()
            for stage, held in placement.addresses.items()
            if held == address and stage not in placement.lost
        ]
