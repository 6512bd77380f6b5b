import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from fusion_tasks.records import StageReport, StepRecord, TrainingHistory, ValidationRecord
from fusion_tasks.report import Summary, loss_curve_png, summary_table


def step(number: int, loss: float) -> StepRecord:
    return StepRecord(
        step=number, loss=loss, grad_norm=1.0, learning_rate=1e-3, tokens=1000, seconds=0.25
    )


def stage(number: int, **changes: object) -> StageReport:
    values: dict[str, object] = {
        "worker": f"worker-{number}",
        "operators": 120,
        "parameters": 1_234_567,
        "busy_s": 7.5,
        "wait_s": 2.0,
        "wall_s": 10.0,
        "sent_bytes": 12_345_678,
    }
    return StageReport(stage=number, **(values | changes))  # type: ignore[arg-type]


def history(steps: int) -> TrainingHistory:
    return TrainingHistory(
        steps=tuple(step(number, 5.5 / number**0.2) for number in range(1, steps + 1)),
        validations=(ValidationRecord(step=steps, loss=2.3456),),
        unigram_entropy=3.1234,
    )


def shown(summary: Summary, width: int = 160) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(summary.rich())
    return stream.getvalue()


def test_the_run_is_one_row_and_each_stage_another() -> None:
    summary = summary_table(history(200), [stage(0), stage(1)], wall_s=61.25)
    assert summary.run.records() == [
        {
            "steps": "200",
            "tokens": "200,000",
            "tokens/s": "4,000",
            "train loss (nats)": "1.9061",
            "validation loss (nats)": "2.3456",
            "unigram entropy (nats)": "3.1234",
            "wall (s)": "61.2",
        }
    ]
    assert summary.stages.records()[1] == {
        "stage": "1",
        "worker": "worker-1",
        "operators": "120",
        "parameters": "1,234,567",
        "busy (%)": "75.0",
        "bubble (%)": "25.0",
        "waiting (s)": "2.00",
        "sent": "12.3 MB",
    }


def test_terminal_and_markdown_show_the_same_cells() -> None:
    summary = summary_table(history(3), [stage(0), stage(1)], wall_s=1.0)
    terminal, markdown = shown(summary), summary.markdown()
    for grid in (summary.run, summary.stages):
        for record in grid.records():
            for heading, cell in record.items():
                assert heading in terminal
                assert cell in terminal
                assert heading in markdown
                assert cell in markdown
    assert markdown == (
        "### Run\n\n"
        "| steps | tokens | tokens/s | train loss (nats) | validation loss (nats) | "
        "unigram entropy (nats) | wall (s) |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| 3 | 3,000 | 4,000 | 4.4151 | 2.3456 | 3.1234 | 1.0 |\n\n"
        "### Stages\n\n"
        "| stage | worker | operators | parameters | busy (%) | bubble (%) | waiting (s) | sent |\n"
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| 0 | worker-0 | 120 | 1,234,567 | 75.0 | 25.0 | 2.00 | 12.3 MB |\n"
        "| 1 | worker-1 | 120 | 1,234,567 | 75.0 | 25.0 | 2.00 | 12.3 MB |\n"
    )


def test_the_name_of_a_worker_cannot_change_the_table() -> None:
    summary = summary_table(history(1), [stage(0, worker="[red]a|b[/]")], wall_s=1.0)
    assert "[red]a|b[/]" in shown(summary)
    assert "[red]a\\|b[/]" in summary.markdown()


def test_what_was_not_measured_is_a_dash_and_not_a_zero() -> None:
    nothing = TrainingHistory(steps=(), validations=(), unigram_entropy=3.0)
    summary = summary_table(nothing, [stage(0, wall_s=0.0)], wall_s=1.0)
    run, row = summary.run.records()[0], summary.stages.records()[0]
    assert (run["tokens/s"], run["train loss (nats)"], run["validation loss (nats)"]) == ("–",) * 3
    assert (row["busy (%)"], row["bubble (%)"]) == ("–", "–")


def test_busy_time_beyond_the_wall_time_is_no_negative_bubble() -> None:
    assert stage(0, busy_s=10.01).bubble_share == 0.0


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("steps", [0, 1, 39, 400])
def test_the_curve_is_a_png_and_the_same_every_time(tmp_path: Path, steps: int) -> None:
    one = loss_curve_png(history(steps), tmp_path / "one.png")
    two = loss_curve_png(history(steps), tmp_path / "two.png")
    assert one.read_bytes().startswith(PNG)
    assert one.read_bytes() == two.read_bytes()
    width, height = (int.from_bytes(one.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (960, 600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]


def test_each_series_is_in_the_curve(tmp_path: Path) -> None:
    whole = loss_curve_png(history(100), tmp_path / "whole.png").read_bytes()
    base = history(100)
    others = {
        "training": TrainingHistory(
            steps=base.steps[:50], validations=base.validations, unigram_entropy=3.1234
        ),
        "validation": TrainingHistory(
            steps=base.steps, validations=(), unigram_entropy=base.unigram_entropy
        ),
        "entropy": TrainingHistory(
            steps=base.steps, validations=base.validations, unigram_entropy=1.0
        ),
    }
    for name, other in others.items():
        changed = loss_curve_png(other, tmp_path / f"{name}.png").read_bytes()
        assert changed != whole, name


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    losses = (5.0, math.nan, math.inf, 4.0)
    broken = TrainingHistory(
        steps=tuple(step(number, loss) for number, loss in enumerate(losses, start=1)),
        validations=(),
        unigram_entropy=3.0,
    )
    assert loss_curve_png(broken, tmp_path / "x.png").read_bytes().startswith(PNG)


def test_an_older_curve_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")
    assert loss_curve_png(history(3), path).read_bytes().startswith(PNG)
