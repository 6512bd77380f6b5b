"""The Gantt picture of a simulation: one self-contained page, SVG inside, no script.

Three pictures: the first step, the first step in which a stage was lost, and who was what over the hours.
A row a worker; in the steps a thin line below it is its uplink. What is narrower than half a pixel is
drawn together with its neighbour, so that a page of 50 stages stays small.

Invariant: equal simulations give equal bytes.
"""

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from fusion_dask.planner.simulator_records import Simulation, Span, StepPicture

__all__ = ["page"]

WIDTH: Final = 1240
LEFT: Final = 110
TOP: Final = 18
#: Rows are as high as the window allows, within these.
ROOM: Final = 480
LOWEST: Final = 9
HIGHEST: Final = 30
TICKS: Final = 8

COLOURS: Final = {
    "forward": "#4c78a8",
    "backward": "#59a14f",
    "send": "#f28e2b",
    "return": "#edc948",
    "down": "#bab0ac",
    "lost": "#e15759",
    "stage": "#4c78a8",
    "restoring": "#edc948",
    "backup": "#d4e6d1",
    "away": "#bab0ac",
}
STYLE: Final = (
    "body{font:13px/1.4 system-ui,sans-serif;margin:12px 16px;max-width:1248px;color:#222}"
    "h1{font-size:18px;margin:0 0 6px}h2{font-size:14px;margin:14px 0 4px}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:1px 12px;margin:0}"
    "dt{color:#666}dd{margin:0}svg{display:block;max-width:100%}text{font-size:10px;fill:#444}"
    "i{display:inline-block;width:10px;height:10px;margin:0 4px 0 10px}"
)


class _Bar(NamedTuple):
    """A rectangle: row, colour, seconds, which part of the row, and what the mouse is told."""

    row: int
    colour: str
    start_s: float
    stop_s: float
    thin: bool
    title: str


def page(simulation: Simulation, model: str, facts: Mapping[str, str]) -> str:
    """The page.

    Args:
        simulation: What is drawn.
        model: For the heading.
        facts: Key figures to list.
    """
    listed = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in facts.items()
    )
    title = html.escape(f"{model}: a simulation")
    parts = [
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style>\n<h1>{title}</h1>\n<dl>{listed}</dl>\n",
        f"<h2>The first step{_of(len(simulation.replicas))}</h2>",
        _legend(("forward", "backward", "send", "return")),
        _step(simulation.step),
    ]
    if simulation.loss_step is not None:
        at_h = simulation.loss_step.at_s / 3600
        parts += [
            f"<h2>The first step with a lost stage, after {at_h:.2f} h</h2>",
            _legend(("forward", "backward", "send", "return", "lost", "down")),
            _step(simulation.loss_step),
        ]
    if simulation.losses:
        parts += [
            "<h2>The hours</h2>",
            _legend(("stage", "restoring", "backup", "away")),
            _hours(simulation.spans, simulation.elapsed_s),
        ]
    return "\n".join(parts) + "\n</html>\n"


def _of(replicas: int) -> str:
    return f", in the first of {replicas} pipelines" if replicas > 1 else ""


def _legend(kinds: Iterable[str]) -> str:
    return "".join(f'<i style="background:{COLOURS[k]}"></i>{k}' for k in kinds)


def _step(picture: StepPicture) -> str:
    bars = [
        _Bar(
            row=i.worker,
            colour="lost" if i.lost else i.kind,
            start_s=i.start_s,
            stop_s=i.stop_s,
            thin=i.kind in {"send", "return"},
            title=f"{i.kind} of microbatch {i.microbatch}, stage {i.stage}"
            if i.stage >= 0
            else "lost, until the replacement is ready",
        )
        for i in picture.run.intervals
    ]
    return _draw(bars, picture.workers, picture.run.end_s, "s", 1.0)


def _hours(spans: Iterable[Span], elapsed_s: float) -> str:
    spans = list(spans)
    names = tuple(dict.fromkeys(s.worker for s in spans))
    rows = {name: i for i, name in enumerate(names)}
    bars = [
        _Bar(
            row=rows[s.worker],
            colour="stage" if s.state.startswith("stage") else s.state,
            start_s=s.start_s,
            stop_s=s.stop_s,
            thin=False,
            title=s.state,
        )
        for s in spans
    ]
    return _draw(bars, names, elapsed_s, "h", 3600.0)


def _draw(
    bars: Iterable[_Bar], names: tuple[str, ...], end_s: float, unit: str, unit_s: float
) -> str:
    height = min(HIGHEST, max(LOWEST, ROOM // max(1, len(names))))
    scale = (WIDTH - LEFT - 10) / end_s
    bottom = TOP + height * len(names)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {bottom + 4}" width="{WIDTH}" height="{bottom + 4}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for k in range(TICKS + 1):
        x = LEFT + scale * end_s * k / TICKS
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#eee"/>')
        label = f"{end_s * k / TICKS / unit_s:.3g} {unit}"
        anchor = "end" if k == TICKS else "middle"
        parts.append(f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{label}</text>')
    for i, name in enumerate(names):
        y = TOP + height * i + height - 3
        parts.append(f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{html.escape(name)}</text>')
    thick = height - 4
    for bar in _joined(bars, 0.5 / scale):
        y = TOP + height * bar.row + (thick + 1 if bar.thin else 0)
        width = max(0.3, (bar.stop_s - bar.start_s) * scale)
        parts.append(
            f'<rect x="{LEFT + bar.start_s * scale:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{2 if bar.thin else thick}" fill="{COLOURS[bar.colour]}">'
            f"<title>{html.escape(bar.title)}</title></rect>"
        )
    return "\n".join([*parts, "</svg>"])


def _joined(bars: Iterable[_Bar], narrow_s: float) -> Iterator[_Bar]:
    """Neighbours of one colour in one bar where there is hardly anything between them."""
    ordered = sorted(bars, key=lambda b: (b.row, b.thin, b.start_s, b.stop_s))
    held: _Bar | None = None
    for bar in ordered:
        if (
            held is not None
            and (held.row, held.thin, held.colour) == (bar.row, bar.thin, bar.colour)
            and bar.start_s - held.stop_s < narrow_s
            and bar.stop_s - bar.start_s < 4 * narrow_s
        ):
            held = held._replace(
                stop_s=max(held.stop_s, bar.stop_s), title=f"{bar.colour}, several"
            )
            continue
        if held is not None:
            yield held
        held = bar
    if held is not None:
        yield held
