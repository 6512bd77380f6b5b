"""`fusion up`: make this machine the broker of a pool.

Covers: the options, starting the supervisor, and what is printed. Not covered: any of these in detail
(`pool/`).

Invariant: when the command succeeds, every service answers; when it fails, none of them runs.
"""

from typing import Annotated

import typer

__all__ = ["up"]


def up(  # noqa: PLR0913 - one argument an option
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; all of them by default.", show_default=False),
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address by which members reach this machine, if it does not know it "
            "itself; repeatable.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the gateway; 8788.", show_default=False),
    ] = None,
    scheduler_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Dask's scheduler; 8786.", show_default=False),
    ] = None,
    prefect_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Prefect; 4200.", show_default=False)
    ] = None,
    store_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="The pool's own store; 8333.", show_default=False),
    ] = None,
    dashboard_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Dask's dashboard, on the loopback; 8787.", show_default=False
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Use this store instead of one of the pool's own.", metavar="URL"),
    ] = None,
    foreground: Annotated[
        bool, typer.Option(help="Do not return; for systemd and containers.")
    ] = False,
) -> None:
    """Make this machine the broker of a pool, and print the line with which others join.

    A pool keeps its addresses, tokens, runs and store over `fusion down` and restarts. Prefect's database
    is SQLite, or what PREFECT_SERVER_DATABASE_CONNECTION_URL names.
    """
    from fusion_flows.cli.pool.decide import UpRequest
    from fusion_flows.cli.pool.start import bring_up

    request = UpRequest(
        host=host,
        addresses=tuple(address or ()),
        gateway=port,
        scheduler=scheduler_port,
        prefect=prefect_port,
        store_port=store_port,
        dashboard=dashboard_port,
        store=store,
    )
    bring_up(request, foreground=foreground)
