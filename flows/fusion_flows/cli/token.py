"""`fusion token`: who may join the pool of this home.

Covers: making, listing and revoking tokens on the broker's machine. Not covered: what a token is
(`fusion_dask.security.tokens`).
"""

from typing import Annotated

import typer

__all__ = ["token"]

token = typer.Typer(
    help="Make, list and revoke the tokens with which others join.", no_args_is_help=True
)


@token.command()
def new(
    role: Annotated[
        str,
        typer.Option(help="What its holders become: provider (lends GPUs) or user (runs flows)."),
    ] = "provider",
    expires: Annotated[str, typer.Option(help="Such as 30m, 24h, 7d, or never.")] = "24h",
    uses: Annotated[
        int | None,
        typer.Option(min=1, help="How many machines may use it; any number by default."),
    ] = None,
    label: Annotated[str, typer.Option(help="For the list.")] = "",
) -> None:
    """Make a token, and print the line that uses it."""
    from fusion_flows.cli.pool.books import make_token

    print(make_token(role=role, expires=expires, uses=uses, label=label))  # noqa: T201


@token.command(name="list")
def list_tokens(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the tokens of this pool; the secrets are not kept."""
    from fusion_flows.cli.pool.books import show_tokens

    show_tokens(as_json=as_json)


@token.command()
def revoke(token_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Take a token back, and send away whoever joined with it."""
    from fusion_flows.cli.pool.books import revoke_token

    print(revoke_token(token_id))  # noqa: T201
