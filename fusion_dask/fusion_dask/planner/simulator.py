"""The simulator: what a pool would do with a model over hours, while workers come and go.

A step without losses takes what the planner predicts; the pipeline of a step with one is run event by event
(`simulator_step.py`). What happens:

- Loss of a worker with a stage, with a journal and somebody in the backup pool who has the memory: after
  `detect_s` the fastest such one fetches the stage's state from the checkpoint, replays the steps
  since then (computing, or reading the journal, whichever is slower) and the lost part of this step.
  Everybody else waits.
- The same without a journal: everybody goes back to the last checkpoint.
- Nobody in the backup pool: the planner plans for whoever is left, `replan_s` later, and everybody goes back
  to the last checkpoint. If nothing fits, the run waits until somebody joins.
- Joining: into the backup pool. At the next checkpoint with more workers than the last plan was made for,
  the plan is changed if the planner makes steps shorter by `WORTHWHILE`.
- A checkpoint every `checkpoint_s`, in whole steps. One that a loss would interrupt is written after it.

Assumed: the broker and the store are never lost, losses are independent of what the run does, the first
plan is in place at the start, planning for a change at a checkpoint happens in the background.

Not covered: the receivers' downlinks, the line of the store, journal and boundary tensors that share an
uplink, data loading, drift of speeds.

Invariant: the same scenario gives the same simulation, and its `Budget` adds up to the time that passed.
"""

from typing import Final

from fusion_dask.errors import PlanError
from fusion_dask.planner.churn import Change
from fusion_dask.planner.simulator_ledger import Ledger
from fusion_dask.planner.simulator_plans import Planner, Plans
from fusion_dask.planner.simulator_records import Scenario, Simulation, StepPicture
from fusion_dask.planner.simulator_regime import Loss, Market, Regime

__all__ = ["simulate"]

#: A step has to become shorter by this share for a plan to be changed at a checkpoint.
WORTHWHILE: Final = 0.05


def simulate(scenario: Scenario, planner: Planner) -> Simulation:
    """Simulate a scenario, for one step at least.

    Args:
        scenario: What happens.
        planner: Makes the plans. It is asked once for each combination of devices and links.

    Raises:
        PlanError: The model does not fit on the whole pool.
    """
    run = _Run(scenario, planner)
    while not run.is_over:
        run.advance()
    return run.result()


class _Run:
    """The state of a simulation, and what makes it go on."""

    def __init__(self, scenario: Scenario, planner: Planner) -> None:
        self._scenario = scenario
        self._market = Market(scenario.model, scenario.pool, scenario.workload)
        self._plans = Plans(scenario, planner)
        self._up = {w.name for w in scenario.pool}
        self._trace = list(reversed(scenario.trace))
        self._ledger = Ledger(market=self._market)
        self._regime: Regime | None = None
        self._loss_step: StepPicture | None = None
        self.is_over = False
        self._first = self._plan()
        self._until_s = max(scenario.until_s, self._first.step_s)
        self._follow(self._first)

    def advance(self) -> None:
        """To the next thing that happens: a loss, a join, a checkpoint, or the end."""
        regime, now_s = self._regime, self._ledger.now_s
        stop_s = min(self._trace[-1].at_s if self._trace else self._until_s, self._until_s)
        if regime is None:
            self._wait(stop_s)
            return
        left = self._every - self._ledger.uncommitted
        if left <= 0 and now_s + regime.commit_s <= stop_s:
            self._ledger.commit(regime)
            self._grow(regime)
            return
        steps = int((stop_s - now_s) / regime.step_s)
        if steps > 0:
            self._ledger.run(regime, min(steps, left) if left > 0 else steps)
        elif stop_s == self._until_s:
            self.is_over = True
        elif self._is_loss(regime, self._trace[-1]):
            self._disturbed_step(regime)
        else:
            self._change_pool(self._trace.pop())

    def result(self) -> Simulation:
        """What came of it."""
        ledger, first = self._ledger, self._first
        return Simulation(
            elapsed_s=ledger.now_s,
            steps=ledger.steps,
            tokens=ledger.tokens,
            tokens_per_s=ledger.tokens / ledger.now_s if ledger.now_s else 0.0,
            mfu=ledger.mfu,
            memory_bytes=dict(first.memory_bytes),
            links=ledger.traffic(first),
            store_bytes=ledger.store_bytes,
            energy_j=ledger.energy_j,
            cost=ledger.cost,
            budget=ledger.budget,
            losses=ledger.losses,
            replaced=ledger.replaced,
            replans=ledger.replans,
            replicas=first.replicas,
            prediction=first.prediction,
            spans=ledger.spans(),
            step=StepPicture(workers=first.places(0), at_s=0.0, run=first.step(0)),
            loss_step=self._loss_step,
        )

    def _plan(self) -> Regime:
        """With everybody who is there.

        Raises:
            PlanError: Nothing fits.
        """
        self._planned_for = len(self._up)
        return Regime(self._market, self._plans.make(self._up))

    def _follow(self, regime: Regime) -> None:
        """Go by a plan from now on."""
        self._regime = regime
        self._every = max(1, round(self._scenario.checkpoint_s / regime.step_s))
        labels = regime.labels()
        for worker in self._scenario.pool:
            waits = "backup" if worker.name in self._up else "away"
            self._ledger.show(worker.name, labels.get(worker.name, waits))

    def _is_loss(self, regime: Regime, change: Change) -> bool:
        return not change.joins and change.worker in regime.names

    def _change_pool(self, change: Change) -> None:
        if change.joins:
            self._up.add(change.worker)
        else:
            self._up.discard(change.worker)
        self._ledger.show(change.worker, "backup" if change.joins else "away", change.at_s)

    def _wait(self, stop_s: float) -> None:
        """Nothing fits: until somebody joins."""
        self._ledger.pause(stop_s)
        if stop_s == self._until_s:
            self.is_over = True
            return
        change = self._trace.pop()
        self._change_pool(change)
        if change.joins:
            self._start_again(change.at_s)

    def _grow(self, regime: Regime) -> None:
        """At a checkpoint: a better plan with who joined since the last one?"""
        if len(self._up) <= self._planned_for:
            return
        try:
            new = self._plan()
        except PlanError:
            return
        if new.step_s < regime.step_s * (1 - WORTHWHILE):
            move_s = new.restore_s(new.names, regime.replicas)
            move_s += self._scenario.recovery.start_s
            self._ledger.recover(new, self._ledger.now_s + move_s)
            self._ledger.replans += 1
            self._follow(new)

    def _disturbed_step(self, regime: Regime) -> None:
        """A step in which stages are lost, and as many replaced."""
        start_s, after = self._ledger.now_s, regime
        end_s = start_s + regime.step_s
        losses: list[Loss] = []
        while self._trace and self._trace[-1].at_s <= end_s:
            change = self._trace.pop()
            self._change_pool(change)
            if not self._is_loss(after, change):
                continue
            self._ledger.losses += 1
            by = after.best_for(change.worker, self._up - after.names)
            if by is None or not self._scenario.workload.journals:
                self._go_back(after, change, by)
                return
            loss = self._replace(after, change, by, start_s)
            losses.append(loss)
            after = loss.after
            end_s = start_s + regime.disturbed_step_s(losses)
        self._note_picture(regime, losses, start_s)
        replayed_j = sum(self._ledger.replay_j(x.by, x.replay_s) for x in losses)
        self._ledger.run(regime, 1)
        self._ledger.recover(after, end_s, replayed_j=replayed_j)
        self._follow(after)

    def _replace(self, regime: Regime, change: Change, by: str, start_s: float) -> Loss:
        """The backup pool takes a stage over."""
        recovery = self._scenario.recovery
        after = regime.replaced(change.worker, by)
        replay_s = after.replay_s(by, self._ledger.uncommitted)
        ready_s = change.at_s + recovery.detect_s + recovery.start_s + after.restore_s([by])
        ready_s += replay_s
        self._ledger.replaced += 1
        self._ledger.show(by, "restoring", change.at_s)
        self._ledger.show(by, after.labels()[by], ready_s)
        at_s = max(0.0, change.at_s - start_s)
        return Loss(
            lost=change.worker,
            by=by,
            at_s=at_s,
            ready_s=max(at_s, ready_s - start_s),
            replay_s=replay_s,
            after=after,
        )

    def _go_back(self, regime: Regime, change: Change, by: str | None) -> None:
        """To the last checkpoint, with a replacement or a new plan."""
        self._ledger.go_back(regime, change.at_s)
        if by is None:
            self._start_again(change.at_s + self._scenario.recovery.detect_s)
            return
        self._ledger.replaced += 1
        self._restore(regime.replaced(change.worker, by), self._scenario.recovery.detect_s)

    def _start_again(self, at_s: float) -> None:
        """From the last checkpoint with a new plan, or wait where there is none."""
        try:
            new = self._plan()
        except PlanError:
            self._regime = None
            for name in self._up:
                self._ledger.show(name, "backup")
            return
        self._ledger.replans += 1
        wait_s = max(0.0, at_s - self._ledger.now_s) + self._scenario.recovery.replan_s
        self._restore(new, wait_s)

    def _restore(self, new: Regime, wait_s: float) -> None:
        """Everybody gets the state of the last checkpoint."""
        for name in new.names:
            self._ledger.show(name, "restoring")
        wait_s += self._scenario.recovery.start_s + new.restore_s(new.names)
        self._ledger.recover(new, self._ledger.now_s + wait_s)
        self._follow(new)

    def _note_picture(self, regime: Regime, losses: list[Loss], start_s: float) -> None:
        if self._loss_step is None:
            replica, _ = regime.where(losses[0].lost)
            run = regime.step(replica, losses)
            self._loss_step = StepPicture(
                workers=losses[-1].after.places(replica), at_s=start_s, run=run
            )
