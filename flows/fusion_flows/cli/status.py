"""`fusion status`: who is in the pool, what it is worth, what it does.

Covers: the options and the live table. Not covered: what the columns say (`table.py`).
"""

import json
import os
import time
from typing import Annotated, Any, Final

import typer

__all__ = ["status"]

REFRESH_S: Final = 1.0


def status(
    cluster: Annotated[
        str | None,
        typer.Option(help="HOST[:PORT] of the pool; the one of this home by default."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All that is known, profiles included, for programs.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Until Ctrl-C.")] = False,
    with_left: Annotated[bool, typer.Option("--all", help="Also who has left.")] = False,
) -> None:
    """Show the workers of the pool: measured speed, memory, link, state, stage, tokens/s."""
    from fusion_flows.cli.membership import as_member, known_pool
    from fusion_tasks import settings

    identity = known_pool(settings.current().home, cluster)
    os.environ.update(as_member(identity))
    # Dask reads its credentials from the environment when it is imported.
    from rich.console import Console
    from rich.live import Live

    from fusion_flows.cli.scheduler import ask
    from fusion_flows.cli.table import members_table

    def look() -> Any:  # noqa: ANN401 - JSON
        return ask(identity.scheduler, "fusion_status")

    console = Console()
    if as_json:
        print(json.dumps(look(), indent=1))  # noqa: T201
    elif not watch:
        console.print(members_table(look(), with_left=with_left))
    else:
        try:
            with Live(members_table(look(), with_left=with_left), console=console) as live:
                while True:
                    time.sleep(REFRESH_S)
                    live.update(members_table(look(), with_left=with_left))
        except KeyboardInterrupt:
            pass
