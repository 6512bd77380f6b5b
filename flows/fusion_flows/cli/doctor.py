"""`fusion doctor`: what is wrong, and what to do about it.

Covers: the options and the printing. Not covered: the checks (`checkup.py`).

Invariant: it changes nothing; it exits with 1 if something is broken.
"""

import json
from typing import Annotated, Final

import typer

__all__ = ["doctor"]

MARKS: Final = {"ok": "[green]ok[/]  ", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}


def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(help="HOST[:PORT] of the pool; the one of this home by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine and its pool: versions, drivers, disk, ports, clock, TLS, store."""
    from rich.console import Console
    from rich.markup import escape

    from fusion_flows.cli.checkup import checkup

    findings = checkup(cluster)
    if as_json:
        rows = [{"check": f.check, "state": f.state, "text": f.text} for f in findings]
        print(json.dumps(rows, indent=1))  # noqa: T201
    else:
        console = Console()
        for finding in findings:
            console.print(
                f"{MARKS[finding.state]} {finding.check:<12}{escape(finding.text)}", soft_wrap=True
            )
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)
