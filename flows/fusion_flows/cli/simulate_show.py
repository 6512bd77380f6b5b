"""What `fusion simulate` prints and writes.

Invariant: what is not known is shown as unknown and never as zero; a file that cannot be written is
found before anything is simulated.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fusion_dask.planner.link_text import show_bits_per_s
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.plan_show import devices_of, shape_of
from fusion_flows.cli.simulate_gantt import page
from fusion_flows.cli.simulate_run import Result

__all__ = ["check_out", "facts", "print_simulation", "write"]

KINDS: Final = (".html", ".json")
UNKNOWN: Final = "–"
#: Busiest links and fullest workers that are listed.
SHOWN: Final = 5


def check_out(out: Path | None) -> None:
    """Raise InputError unless the file can be written and is of a known kind."""
    if out is None:
        return
    if out.suffix not in KINDS:
        raise InputError(f"--out {out}: the name must end in {' or '.join(KINDS)}")
    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"--out {out}: name a file in a folder that exists")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise InputError(f"--out {out}: no permission to write there; name another file")


def facts(result: Result) -> dict[str, str]:
    """The key figures, for people."""
    found, asked = result.simulation, result.asked
    cost = result.cost_per_million_tokens
    powered = any(w.power_w for w in result.pool.workers)
    budget = found.budget
    shares = {
        "steps": budget.steps_s,
        "repeated": budget.repeated_s,
        "recovery": budget.recovery_s,
        "checkpoints": budget.checkpoints_s,
        "paused": budget.paused_s,
    }
    return {
        "pool": f"{devices_of(result.pool.workers)}; {asked.link or 'links as known'}",
        "plan": f"{shape_of(found.replicas)}; {result.scenario.spare} spared",
        "speed": f"{found.tokens_per_s:,.0f} tokens/s over {found.elapsed_s / 3600:.1f} h, "
        f"{found.steps:,} steps of {found.prediction.step_s:.3g} s",
        "MFU, bubble": f"{found.mfu:.1%}, {max(0.0, found.bubble):.0%} of an undisturbed step",
        "time": ", ".join(
            f"{name} {seconds / found.elapsed_s:.1%}"
            for name, seconds in shares.items()
            if seconds > 0
        ),
        "losses": f"{found.losses}: {found.replaced} taken over by the backup pool, "
        f"{found.replans} new plans; churn {asked.churn}",
        "recovery": _recovery(result),
        "energy": f"{found.energy_j_per_token:.3g} J/token" if powered else UNKNOWN,
        "cost": UNKNOWN if cost is None else f"${cost:.3g} per million tokens",
        "store": f"{_size(found.store_bytes)} written, "
        f"{show_bits_per_s(found.store_bytes / found.elapsed_s)} on average",
    }


def print_simulation(console: Console, result: Result) -> None:
    """Everything for a person."""
    console.print(
        f"{result.asked.model}, {result.scenario.model.dtype}: {result.asked.microbatches} "
        f"microbatches of {result.scenario.model.tokens:,} tokens a step"
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts(result).items():
        table.add_row(name, value)
    console.print(table)
    console.print(_memory(result))
    if result.simulation.links:
        console.print(_links(result))


def write(result: Result, out: Path) -> None:
    """Write the picture or the numbers, by the ending of the name.

    Raises:
        InputError: The file cannot be written.
    """
    if out.suffix == ".json":
        text = json.dumps(result.to_json(), indent=1)
    else:
        text = page(result.simulation, result.asked.model, facts(result))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}; name another file") from error


def _size(size_bytes: float) -> str:
    for scale, unit in ((1e12, "TB"), (1e9, "GB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:,.3g} {unit}"
    return f"{size_bytes / 1e6:.3g} MB"


def _recovery(result: Result) -> str:
    how = "a lost stage is replayed" if result.asked.journal else "all go back to the checkpoint"
    parts = result.scenario.recovery
    return (
        f"{how}; noticed after {parts.detect_s:g} s, start {parts.start_s:g} s, new plan "
        f"{parts.replan_s:g} s, checkpoint every {result.scenario.checkpoint_s / 60:g} min"
    )


def _memory(result: Result) -> Table:
    room = {w.name: w.profile.free_memory_bytes for w in result.pool.workers}
    used = result.simulation.memory_bytes
    ranked = sorted(used, key=lambda name: -used[name] / room[name])
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"fullest of {len(used)} workers", overflow="fold")
    table.add_column("memory", justify="right")
    table.add_column("of", justify="right")
    for name in ranked[:SHOWN]:
        table.add_row(name, f"{used[name] / 1e9:.2f} GB", f"{room[name] / 1e9:.2f} GB")
    return table


def _links(result: Result) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("busiest links", overflow="fold")
    for name in ("a step", "on average", "busy", "all"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _link_rows(result):
        table.add_row(*row)
    return table


def _link_rows(result: Result) -> Iterator[tuple[str, ...]]:
    found = result.simulation
    for link in found.links[:SHOWN]:
        yield (
            f"{link.sender} to {link.receiver}",
            _size(link.step_bytes),
            show_bits_per_s(link.total_bytes / found.elapsed_s),
            f"{link.busy:.0%}",
            _size(link.total_bytes),
        )
