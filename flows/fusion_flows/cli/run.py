"""`fusion run`: a flow with everything it needs around it.

Covers: the options, and the order of things: check all that can be checked, start what is missing,
run the flow, end what was started. Not covered: any of these in detail.

Invariant: bad input is found before a process is started; what was started has ended when the
command has.
"""

from typing import Annotated

import typer

__all__ = ["run"]


def run(  # noqa: PLR0913 - one argument an option
    target: Annotated[
        str, typer.Argument(help="A built-in procedure, or my/flow.py, or my/flow.py:name.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Set a parameter of the flow; repeatable."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers to start; by default one per GPU, or 2.", show_default=False
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="The pool at HOST[:PORT], or the Dask scheduler at tcp://… or tls://…; by default the "
            "pool that this home belongs to, if it is up.",
            metavar="ADDRESS",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FUSION_TOKEN",
            help="Become a user of the pool with it, or with what standard input has if it is -; "
            "not needed again.",
            show_default=False,
        ),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="On this machine alone, whatever pool there is.")
    ] = False,
    store: Annotated[
        str | None, typer.Option(help="URL or folder of the store.", metavar="URL")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Continue this run.", metavar="RUN")] = None,
    prefect_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of the Prefect server and UI; a free one by default."
        ),
    ] = None,
    dashboard_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of Dask's dashboard; none by default."),
    ] = None,
    threads_per_worker: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of a worker; its share of the cores by default."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show what Prefect says of itself.")] = False,
) -> None:
    """Run a flow: a built-in procedure or any Prefect flow of yours.

    Without a pool, Dask and Prefect are started on this machine and ended afterwards.
    """
    # Prefect and Dask take seconds to import, and they read the environment that is set here.
    from fusion_flows.cli.session import execute
    from fusion_flows.cli.startup import Request

    request = Request(
        target=target,
        settings=tuple(settings or ()),
        workers=workers,
        cluster=cluster,
        token=token,
        local=local,
        store=store,
        resume=resume,
        prefect_port=prefect_port,
        dashboard_port=dashboard_port,
        threads_per_worker=threads_per_worker,
        verbose=verbose,
    )
    raise typer.Exit(execute(request))
