"""`fusion simulate --headline`: the paper's analysis as tables, and what it stands on.

Invariant: what comes from the paper's abstract and what this project assumes are listed apart.
"""

from dataclasses import asdict
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fusion_dask.planner.headline import (
    ABSTRACT,
    ASSUMPTIONS,
    COMPARABLE,
    COMPRESSIONS,
    LINKS_BITS_PER_S,
    MODELS,
    PAPER_SIDE,
    REFERENCES,
    Fit,
    Row,
    Side,
    row,
)
from fusion_dask.planner.link_text import show_bits_per_s

__all__ = ["print_headline", "to_json"]

NAMES: Final = {"rtx3080": "RTX 3080", "h100-pcie": "H100 PCIe", "h100-sxm": "H100 SXM"}


def print_headline(console: Console) -> None:
    """Everything for a person."""
    console.print("From the paper's abstract (arXiv 2309.01172):")
    for line in ABSTRACT:
        console.print(f"  - {line}")
    console.print("Assumed by this project:")
    for line in ASSUMPTIONS:
        console.print(f"  - {line}")
    console.print(_sides())
    rows = {side.gpu.name: [row(model, side) for model in MODELS] for side in REFERENCES}
    console.print(_models(rows[REFERENCES[0].gpu.name]))
    for side in REFERENCES:
        console.print(_throughput(side, rows[side.gpu.name]))
    for side in REFERENCES:
        console.print(_verdict(side, rows[side.gpu.name]))


def to_json() -> dict[str, Any]:
    """Everything for a program; bits/s, bytes, W and US dollars."""
    rows = []
    for side in REFERENCES:
        for model in MODELS:
            found = row(model, side)
            plain = asdict(found) | {"reference": side.gpu.name}
            rows.append(plain)
    return {
        "abstract": list(ABSTRACT),
        "assumptions": list(ASSUMPTIONS),
        "links_bits_per_s": list(LINKS_BITS_PER_S),
        "compressions": dict(COMPRESSIONS),
        "sides": [_side(side) for side in (PAPER_SIDE, *REFERENCES)],
        "rows": rows,
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "gpu": side.gpu.name,
        "count": side.count,
        "flops_per_s": side.flops_per_s,
        "memory_bytes": side.memory_bytes,
        "power_w": side.power_w,
        "price_usd": side.price_usd,
    }


def _sides() -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("PFLOP/s", "50 RTX 3080\nover it", "memory", "power", "price"):
        table.add_column(name, justify="right")
    for side in (PAPER_SIDE, *REFERENCES):
        table.add_row(
            f"{side.count} {NAMES[side.gpu.name]}",
            f"{side.flops_per_s / 1e15:.2f}",
            f"{PAPER_SIDE.flops_per_s / side.flops_per_s:.2f}",
            f"{side.memory_bytes / 1e9:,.0f} GB",
            f"{side.power_w / 1e3:.1f} kW",
            f"${side.price_usd:,.0f}",
        )
    return table


def _models(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("model")
    table.add_column("GFLOP\na token", justify="right")
    table.add_column("link for full\nthroughput", justify="right")
    table.add_column("memory of a\nRTX 3080", justify="right")
    table.add_column("memory of\nan H100", justify="right")
    table.add_column("RTX 3080\nfor states", justify="right")
    for found in rows:
        table.add_row(
            found.model,
            f"{found.flops_per_token / 1e9:,.1f}",
            show_bits_per_s(found.full_link_bits_per_s / 8),
            _fit(found.fit),
            _fit(found.reference_fit),
            f"{found.gpus_needed:,}",
        )
    table.caption = (
        "the link is needed each way between neighbours; a worker's line carries twice that; "
        "* activations computed again"
    )
    return table


def _fit(fit: Fit) -> str:
    used = f"{fit.need_bytes / 1e9:,.1f} GB"
    return used + ("*" if fit.recomputes else "") if fit.fits else f"{used}, too much"


def _throughput(side: Side, rows: list[Row]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"throughput over that of {side.count} {NAMES[side.gpu.name]}",
        title_justify="left",
    )
    table.add_column("model")
    table.add_column("boundaries")
    for link in LINKS_BITS_PER_S:
        table.add_column(show_bits_per_s(link / 8).replace(" ", "\n"), justify="right")
    for found in rows:
        for name in COMPRESSIONS:
            values = found.relative[name]
            cells = [f"[bold]{v:.2f}[/]" if v >= COMPARABLE else f"{v:.2f}" for v in values]
            plain = "fp16" if name == "none" else name
            title = found.model if found.fit.fits else f"{found.model}†"
            table.add_row(title if name == "none" else "", plain, *cells)
    table.caption = "† would be: it does not fit on either side"
    return table


def _verdict(side: Side, rows: list[Row]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=f"comparable with {side.count} {NAMES[side.gpu.name]}",
        title_justify="left",
    )
    table.add_column("model")
    table.add_column("fp16 boundaries")
    table.add_column("8 bits")
    table.add_column("4 bits")
    for found in rows:
        if not found.fit.fits:
            table.add_row(found.model, "no: it does not fit", "no", "no")
            continue
        cells = [_from(found, name) for name in COMPRESSIONS]
        table.add_row(found.model, *cells)
    return table


def _from(found: Row, compression: str) -> str:
    slowest = found.comparable_link_bits_per_s[compression]
    if slowest is None:
        return f"no: {max(found.relative[compression]):.2f} at best"
    return f"from {show_bits_per_s(slowest / 8)}"
