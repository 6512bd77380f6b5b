"""`fusion join`: lend this machine to a pool.

Covers: the options, and the order of things: check the options, become a member, run workers. Not covered:
any of these in detail (`provider/`).

Invariant: bad input is found before anything is started or said to anybody.
"""

from typing import Annotated

import typer

__all__ = ["join"]


def join(  # noqa: PLR0913 - one argument an option
    address: Annotated[str, typer.Argument(help="HOST or HOST:PORT, as `fusion up` prints it.")],
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FUSION_TOKEN",
            help="From `fusion up` or `fusion token new`, or - to read it from standard input; not "
            "needed again once joined.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of this machine; as it joined before, or its host name, by default."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Such as gpu0,gpu2 or a UUID, or cpu, cpu*2; every GPU by default, or the CPU."
        ),
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            help="CPU workers that behave like fractions of each other, such as "
            "rtx3080,2*rtx4090:0.5 or cpu:1,cpu:0.25@100mbit/20ms."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Shape the links of emulated devices: bandwidth/delay, 100mbit/20ms."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="What a worker may fill, such as 8GB; all that is free.")
    ] = None,
    lend: Annotated[
        str | None, typer.Option(help="Hours of local time, such as 22:00-07:00; always.")
    ] = None,
    backup: Annotated[
        bool, typer.Option("--backup", help="For the backup pool: used when others are lost.")
    ] = False,
) -> None:
    """Lend the GPUs of this machine: one worker each, measured and pinned.

    Ctrl-C gives them back once their segment is done; a second one at once.
    """
    from fusion_flows.cli.provider.request import JoinRequest
    from fusion_flows.cli.provider.session import execute

    request = JoinRequest(
        address=address,
        name=name,
        devices=devices,
        emulate=emulate,
        link=link,
        memory=memory,
        lend=lend,
        backup=backup,
    )
    execute(request, token)
