"""What `fusion graph` does with a model: cut it, print a table, write a picture.

Invariant: a file that cannot be written is found before the model is captured.
"""

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate
from fusion_dask.graph.ir import StageProgram
from fusion_dask.graph.picture import draw_svg, quantity
from fusion_dask.graph.summary import StageRow, stage_rows, to_json
from fusion_dask.planner.plan import make_plan
from fusion_flows.cli.errors import InputError

__all__ = ["check_out", "cut_in_stages", "print_table", "write"]

KINDS: Final = (".svg", ".html", ".json")


def check_out(out: Path | None) -> None:
    """Raise InputError unless the file can be written and is of a known kind."""
    if out is None:
        return
    if out.suffix not in KINDS:
        raise InputError(f"--out {out}: the name must end in {', '.join(KINDS)}")
    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"--out {out}: name a file in a folder that exists")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise InputError(f"--out {out}: no permission to write there; name another file")


def cut_in_stages(
    module: nn.Module, inputs: Mapping[str, Tensor], stages: int
) -> tuple[StageProgram, ...]:
    """Capture a model and cut it for workers of equal speed.

    Raises:
        FusionError: It cannot be captured, or not cut into as many stages.
    """
    graph = annotate(capture(module, inputs))
    workers = [f"worker {i}" for i in range(stages)]
    _, programs = make_plan(graph, workers, stages=stages, microbatches=stages)
    return programs


def print_table(programs: Sequence[StageProgram]) -> None:
    """Print one row a stage, and the sum."""
    table = Table(box=SIMPLE_HEAD, show_footer=len(programs) > 1, pad_edge=False)
    rows = stage_rows(programs)
    table.add_column("stage", footer="all")
    table.add_column("begins with", overflow="fold", min_width=12)
    for header, total in zip(
        ("operators", "parameters", "FLOPs", "sends", "memory"), _totals(rows), strict=True
    ):
        table.add_column(header, footer=total, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.stage),
            row.first_module,
            str(row.operators),
            quantity(row.parameters),
            quantity(row.flops),
            quantity(row.sent_bytes, "B"),
            quantity(row.memory.total, "B"),
        )
    Console().print(table)


def _totals(rows: Sequence[StageRow]) -> tuple[str, ...]:
    return (
        str(sum(r.operators for r in rows)),
        quantity(sum(r.parameters for r in rows)),
        quantity(sum(r.flops for r in rows)),
        quantity(sum(r.sent_bytes for r in rows), "B"),
        quantity(sum(r.memory.total for r in rows), "B"),
    )


def write(programs: Sequence[StageProgram], out: Path, *, title: str) -> None:
    """Write the picture or the numbers, by the ending of the name.

    Raises:
        InputError: The file cannot be written.
    """
    if out.suffix == ".json":
        text = json.dumps(to_json(programs), indent=1)
    else:
        text = draw_svg(programs, title)
        if out.suffix == ".html":
            text = _page(text, title)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}; name another file") from error


def _page(svg: str, title: str) -> str:
    """The picture as a page that scrolls in both directions."""
    return (
        f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        "<style>body { margin: 1em; font-family: sans-serif } svg { max-width: none }</style>\n"
        f"{svg[svg.index('<svg') :]}"
    )
