"""Draw a cut graph: a column a stage, a box a block, a line where values flow.

Drawn with matplotlib, which the project has anyway, on its SVG backend: no server, no GraphViz. The
picture has the blocks of `summary`, not single operators, so that a model of 13B still fits.

Invariant: equal programs give equal bytes.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from fusion_dask.graph.ir import Kind, StageProgram
from fusion_dask.graph.summary import Block, block_edges, blocks

__all__ = ["draw_svg", "quantity"]

_WIDTH, _HEIGHT = 3.2, 0.5  # of a box, in inches
_COLUMN, _ROW = 4.6, 0.68
_COLOURS = {Kind.PARAMETRIC: "#cfe3f7", Kind.STATELESS: "#f1f1ef", Kind.LOSS: "#f9d9cf"}
_SKIP, _BOUNDARY = "#9aa5b1", "#c2410c"


@dataclass(frozen=True, slots=True)
class _Box:
    block: Block
    x: float
    y: float


def quantity(number: float, unit: str = "") -> str:
    """A number with a decimal prefix.

    >>> quantity(3_200_000, "B"), quantity(950), quantity(0, "FLOP")
    ('3.2 MB', '950', '0 FLOP')
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".strip()


def draw_svg(programs: Sequence[StageProgram], title: str) -> str:
    """The picture as SVG text."""
    boxes = _place(programs)
    width = _COLUMN * len(programs) + 0.4
    height = -min((b.y for b in boxes), default=0.0) + 2.0
    with mpl.rc_context({"svg.hashsalt": "fusion", "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(-0.4, width - 0.4)
        axes.set_ylim(1.2 - height, 1.2)
        axes.set_axis_off()
        axes.text(0, 0.95, title, fontsize=11, va="center", weight="bold")
        _draw_columns(axes, programs, height)
        _draw_edges(axes, boxes, programs)
        for box in boxes:
            _draw_box(axes, box)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _place(programs: Sequence[StageProgram]) -> list[_Box]:
    return [
        _Box(block, program.index * _COLUMN, -row * _ROW)
        for program in programs
        for row, block in enumerate(blocks(program))
    ]


def _draw_columns(axes: Axes, programs: Sequence[StageProgram], height: float) -> None:
    for program in programs:
        x = program.index * _COLUMN
        axes.text(
            x,
            0.55,
            f"stage {program.index}: {quantity(sum(p.spec.numel for p in program.parameters))} "
            f"parameters, {quantity(program.flops, 'FLOP')}",
            fontsize=9,
            va="center",
        )
        if program.index:
            axes.axvline(x - 0.55, 0, 1 - 0.6 / height, color="#dddddd", linewidth=1)


def _draw_box(axes: Axes, box: _Box) -> None:
    block = box.block
    axes.add_patch(
        FancyBboxPatch(
            (box.x, box.y - _HEIGHT / 2),
            _WIDTH,
            _HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=_COLOURS[block.kind],
            edgecolor="#555555",
            linewidth=0.6,
            zorder=2,
        )
    )
    name = block.module or ", ".join(dict.fromkeys(block.operators))
    count = len(block.operators)
    details = [f"{count} operators" if count > 1 else block.operators[0]]
    if block.parameters:
        details.append(f"{quantity(block.parameters)} parameters")
    if block.flops:
        details.append(quantity(block.flops, "FLOP"))
    lines = ((0.1, _shortened(name), 7.5, "black"), (-0.12, ", ".join(details), 6.0, "#444444"))
    for shift, text, size, colour in lines:
        axes.text(
            box.x + 0.1, box.y + shift, text, fontsize=size, color=colour, va="center", zorder=3
        )


def _shortened(name: str, limit: int = 46) -> str:
    return name if len(name) <= limit else "…" + name[1 - limit :]


def _draw_edges(axes: Axes, boxes: Sequence[_Box], programs: Sequence[StageProgram]) -> None:
    labelled: set[tuple[int, int]] = set()
    crossing = {(p.index, port.stage): port.bytes for p in programs for port in p.sends}
    for source, target in sorted(block_edges(programs)):
        a, b = boxes[source], boxes[target]
        if a.block.stage != b.block.stage:
            pair = (a.block.stage, b.block.stage)
            start, end = (a.x + _WIDTH, a.y), (b.x, b.y)
            _arrow(axes, start, end, colour=_BOUNDARY, curve=0.0, width=1.2)
            if pair not in labelled:
                labelled.add(pair)
                axes.text(
                    b.x - 0.1,
                    b.y + 0.12,
                    quantity(crossing[pair], "B"),
                    fontsize=6.5,
                    color=_BOUNDARY,
                    ha="right",
                )
        elif target == source + 1:
            middle = a.x + _WIDTH / 2
            start, end = (middle, a.y - _HEIGHT / 2), (middle, b.y + _HEIGHT / 2)
            _arrow(axes, start, end, colour="#555555", curve=0.0, width=0.8)
        else:
            start, end = (a.x + _WIDTH, a.y), (b.x + _WIDTH, b.y)
            curve = min(0.5, 1.2 / max(a.y - b.y, 1e-6))
            _arrow(axes, start, end, colour=_SKIP, curve=-curve, width=0.6)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    colour: str,
    curve: float,
    width: float,
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=7,
            connectionstyle=f"arc3,rad={curve}",
            color=colour,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            zorder=1,
        )
    )
