import io

import pytest
from rich.console import Console

from fusion_tasks.progress import progress
from fusion_tasks.records import StepRecord


def step(number: int, seconds: float = 0.5) -> StepRecord:
    return StepRecord(
        step=number, loss=3.25, grad_norm=1.0, learning_rate=1e-3, tokens=1000, seconds=seconds
    )


def lines(total: int, first: int = 1) -> list[str]:
    stream = io.StringIO()
    with progress(total, console=Console(file=stream, width=40), done_steps=first - 1) as advance:
        for number in range(first, total + 1):
            advance(step(number))
    return stream.getvalue().splitlines()


def test_without_a_terminal_it_is_one_line_about_every_twentieth() -> None:
    shown = lines(200)
    assert shown[0] == "step 1/200 (0 %)  loss 3.2500  2,000 tokens/s  0:01:40 left"
    assert shown[-1] == "step 200/200 (100 %)  loss 3.2500  2,000 tokens/s  0:00:00 left"
    assert [line.split("/")[0] for line in shown[1:4]] == ["step 20", "step 30", "step 40"]
    assert len(shown) == 20


@pytest.mark.parametrize(("total", "count"), [(1, 1), (5, 5), (20, 20), (1_000, 20), (1_001, 20)])
def test_short_runs_show_every_step_and_long_ones_no_more_than_twenty(
    total: int, count: int
) -> None:
    shown = lines(total)
    assert len(shown) == count
    assert shown[0].startswith("step 1/")
    assert shown[-1].startswith(f"step {total}/{total} (100 %)")


def test_a_resumed_run_goes_on_where_it_was() -> None:
    shown = lines(100, first=51)
    assert shown[0].startswith("step 51/100 (51 %)")
    assert len(shown) == 11


def test_no_line_holds_control_codes() -> None:
    assert "\x1b" not in "\n".join(lines(40))


def test_the_speed_follows_the_records_and_not_a_clock() -> None:
    stream = io.StringIO()
    with progress(4, console=Console(file=stream)) as advance:
        for number, seconds in enumerate((1.0, 2.0, 2.0), start=1):
            advance(step(number, seconds))
    speeds = [line.split("  ")[2] for line in stream.getvalue().splitlines()]
    assert speeds == ["1,000 tokens/s", "909 tokens/s", "840 tokens/s"]


def test_a_step_without_time_is_no_division_by_zero() -> None:
    stream = io.StringIO()
    with progress(1, console=Console(file=stream)) as advance:
        advance(step(1, seconds=0.0))
    assert "0 tokens/s" in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_same_figures() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with progress(4, console=console, done_steps=1) as advance:
        for number in (2, 3, 4):
            advance(step(number))
    shown = stream.getvalue()
    assert "step 1/4" in shown
    assert "step 4/4" in shown
    assert "loss 3.2500  2,000 tokens/s  0:00:00 left" in shown
    assert "━" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failure_inside_is_not_swallowed(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with pytest.raises(RuntimeError, match="boom"), progress(4, console=console):
        raise RuntimeError("boom")
