"""The live view of a training run.

Covers a bar on a terminal and plain lines elsewhere. Does not cover where the records come from.
Invariant: what is shown depends on the records only, never on a clock of its own, so that records
that arrive in bursts show the same speed as records that arrive one by one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fusion_tasks.records import StepRecord

__all__ = ["progress"]

# Weight of the newest step in the speed: about the last ten steps count.
_NEWEST = 0.1

_LINES = 20


@contextmanager
def progress(
    total_steps: int, *, console: Console, done_steps: int = 0
) -> Iterator[Callable[[StepRecord], None]]:
    """Show step, loss, tokens per second and the time that is left.

    On a terminal it is a bar; elsewhere, one line about every 5 % of the steps, the first step and
    the last.

    Args:
        total_steps: Number of the last step.
        console: Where to show it.
        done_steps: Steps that an earlier attempt of the run has made.

    Yields:
        What takes each step's record, in order.
    """
    speed: _Speed | None = None

    def measured(record: StepRecord) -> _Speed:
        nonlocal speed
        speed = _Speed.first(record) if speed is None else speed.after(record)
        return speed

    if not console.is_terminal:
        shown = 0

        def line(record: StepRecord) -> None:
            nonlocal shown
            now = measured(record)
            share = record.step * _LINES // total_steps
            if shown == 0 or share > shown:
                console.print(
                    _line(record, now, total_steps), markup=False, highlight=False, soft_wrap=True
                )
                shown = max(share, 1)

        yield line
        return

    bar = Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}"),
        console=console,
        expand=True,
    )
    with bar:
        task = bar.add_task("", total=total_steps, completed=done_steps, state="")

        def move(record: StepRecord) -> None:
            state = _state(record, measured(record), total_steps)
            bar.update(task, completed=record.step, state=state)

        yield move


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    """Smoothed time and tokens of a step."""

    step_s: float
    step_tokens: float

    @classmethod
    def first(cls, record: StepRecord) -> Self:
        return cls(step_s=record.seconds, step_tokens=record.tokens)

    def after(self, record: StepRecord) -> "_Speed":
        return _Speed(
            step_s=self.step_s + _NEWEST * (record.seconds - self.step_s),
            step_tokens=self.step_tokens + _NEWEST * (record.tokens - self.step_tokens),
        )

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / self.step_s if self.step_s > 0 else 0.0


def _state(record: StepRecord, speed: _Speed, total_steps: int) -> str:
    left_s = max(total_steps - record.step, 0) * speed.step_s
    return f"loss {record.loss:.4f}  {speed.tokens_per_s:,.0f} tokens/s  {_duration(left_s)} left"


def _line(record: StepRecord, speed: _Speed, total_steps: int) -> str:
    percent = 100 * record.step // total_steps
    return f"step {record.step}/{total_steps} ({percent} %)  {_state(record, speed, total_steps)}"


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _duration(59.6), _duration(3723)
    ('0:01:00', '1:02:03')
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
