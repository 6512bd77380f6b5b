"""What a person sees at the end of a training run: the loss curve and the summary.

Covers the PNG and one summary that is rendered for a terminal, as markdown and as plain rows (for
artifacts of the flow engine). Does not cover measuring (`records` says what is measured) nor the
live view (`progress`). Invariant: the same records give the same text and the same PNG bytes.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fusion_tasks.records import StageReport, TrainingHistory

__all__ = ["Grid", "Summary", "loss_curve_png", "summary_table"]

_NONE = "–"

# A curve of more steps than this is noise to the eye: it is drawn pale, its running mean on top.
_RAW_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of texts; columns with numbers are aligned to the right.

    Attributes:
        title: Its heading.
        columns: Heading of each column, with the unit.
        rows: One text a column.
        left: Headings of the columns that hold words.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str] = frozenset()

    def rich(self) -> Table:
        """For a terminal; nothing in a cell is taken as markup."""
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(Text(column), justify="left" if column in self.left else "right")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def markdown(self) -> str:
        """As a table of GitHub's markdown; nothing in a cell ends the cell."""
        rule = ["---" if column in self.left else "---:" for column in self.columns]
        lines = [self.columns, rule, *self.rows]
        cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        return "\n".join([f"### {self.title}", "", *(f"| {line} |" for line in cells)])

    def records(self) -> list[dict[str, str]]:
        """One mapping of heading to text a row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in one line, and where the time of its stages went."""

    run: Grid
    stages: Grid

    def rich(self) -> Group:
        """Both tables for a terminal."""
        return Group(self.run.rich(), self.stages.rich())

    def markdown(self) -> str:
        """Both tables as markdown."""
        return f"{self.run.markdown()}\n\n{self.stages.markdown()}\n"


def summary_table(
    history: TrainingHistory, stages: Sequence[StageReport], *, wall_s: float
) -> Summary:
    """Sum up a run.

    Args:
        history: What it went through. Tokens per second are over the wall time of the steps.
        stages: Where the time went, one report a stage.
        wall_s: Wall time of the whole run, preparation and publishing included.
    """
    train = history.steps[-1].loss if history.steps else None
    validation = history.validations[-1].loss if history.validations else None
    run = {
        "steps": f"{len(history.steps):,}",
        "tokens": f"{history.tokens:,}",
        "tokens/s": _decimal(history.tokens_per_s, 0),
        "train loss (nats)": _decimal(train, 4),
        "validation loss (nats)": _decimal(validation, 4),
        "unigram entropy (nats)": _decimal(history.unigram_entropy, 4),
        "wall (s)": _decimal(wall_s, 1),
    }
    columns = (
        "stage",
        "worker",
        "operators",
        "parameters",
        "busy (%)",
        "bubble (%)",
        "waiting (s)",
        "sent",
    )
    return Summary(
        run=Grid(title="Run", columns=tuple(run), rows=(tuple(run.values()),)),
        stages=Grid(
            title="Stages",
            columns=columns,
            rows=tuple(map(_stage_row, stages)),
            left=frozenset({"worker"}),
        ),
    )


def loss_curve_png(history: TrainingHistory, path: Path) -> Path:
    """Draw the loss over the steps: training, validation, and the unigram entropy as a line.

    Args:
        history: What the run went through; values that are not finite leave a gap.
        path: The PNG to write; an existing one is replaced in one go.

    Returns:
        The path.
    """
    # A figure of its own, without pyplot: no global state, no display, any thread.
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = [record.step for record in history.steps]
    losses = [record.loss for record in history.steps]
    window = max(1, len(losses) // _RAW_STEPS)
    if window > 1:
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    label = "training" if window == 1 else f"training (mean of {window} steps)"
    marker = "." if len(steps) == 1 else None
    axes.plot(steps, _running_mean(losses, window), color="tab:blue", label=label, marker=marker)
    axes.plot(
        [record.step for record in history.validations],
        [record.loss for record in history.validations],
        "o-",
        color="tab:orange",
        label="validation",
    )
    axes.axhline(
        history.unigram_entropy,
        color="tab:gray",
        linestyle="--",
        label=f"unigram entropy ({history.unigram_entropy:.2f})",
    )
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    scratch = path.with_name(f".{path.name}.part")
    try:
        # Without the name and version of the drawing library: equal curves, equal bytes.
        figure.savefig(scratch, format="png", metadata={"Software": None})
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def _stage_row(stage: StageReport) -> tuple[str, ...]:
    return (
        str(stage.stage),
        stage.worker,
        f"{stage.operators:,}",
        f"{stage.parameters:,}",
        _percent(stage.busy_share),
        _percent(stage.bubble_share),
        _decimal(stage.wait_s, 2),
        _size(stage.sent_bytes),
    )


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the finite ones of the last `window` values, of fewer at the start.

    >>> _running_mean([1.0, 3.0, 5.0, math.nan, 7.0], 2)
    [1.0, 2.0, 4.0, 5.0, 7.0]
    """
    given = np.array(values, dtype=float)
    finite = np.isfinite(given)
    sums = np.cumsum([0.0, *np.where(finite, given, 0.0)])
    counts = np.cumsum([0, *finite])
    ends = np.arange(1, sums.size)
    starts = np.maximum(ends - window, 0)
    inside = counts[ends] - counts[starts]
    gaps = np.full(ends.size, math.nan)
    means = np.divide(sums[ends] - sums[starts], inside, out=gaps, where=inside > 0)
    return [float(mean) for mean in means]


def _decimal(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}"


def _size(count_bytes: float) -> str:
    """A size in decimal units.

    >>> _size(0), _size(999), _size(12_345_678)
    ('0 B', '999 B', '12.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:,.1f} TB"
