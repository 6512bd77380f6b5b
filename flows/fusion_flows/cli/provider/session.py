"""One `fusion join` from its options to its end: what has to happen before Dask is imported.

Invariant: a token that was given is used, so that a person sees whether it is valid; without one an
earlier membership is. A provider is called what its certificate says.
"""

import os
import sys

from fusion_dask.errors import SecurityError
from fusion_dask.security.enrol import enrol
from fusion_dask.security.identity import Identity, find
from fusion_dask.security.roles import Role
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.membership import as_member, read_token
from fusion_flows.cli.provider.request import JoinRequest, default_name, shares_of, window_of
from fusion_tasks import settings

__all__ = ["execute"]


def execute(request: JoinRequest, token: str | None) -> None:
    """Check, become a member, lend.

    Raises:
        CliError: For the caller to print.
        FusionError: The same.
    """
    shares, window = shares_of(request), window_of(request)
    identity = _membership(request, read_token(token, sys.stdin))
    os.environ.update(as_member(identity))
    from fusion_flows.cli.provider.lend import lend

    lend(identity, shares, name=identity.name, window=window, backup=request.backup)


def _membership(request: JoinRequest, token: str | None) -> Identity:
    home = settings.current().home
    try:
        known = find(home, request.address, Role.PROVIDER)
    except SecurityError:
        # A token makes a new one in its place.
        if token is None:
            raise
        known = None
    if token is None:
        if known is None:
            raise InputError(
                f"this machine is no member of the pool at {request.address}, or not any more; join "
                "with --token and a token from `fusion token new` on the broker's machine"
            )
        if request.name not in {None, known.name}:
            raise InputError(
                f"this machine joined that pool as {known.name}; leave --name away, or join as "
                f"{request.name} with --token and a token from `fusion token new`"
            )
        return known
    name = request.name or (default_name() if known is None else known.name)
    identity = enrol(request.address, token, name=name, home=home)
    if identity.role is not Role.PROVIDER:
        raise SecurityError(
            f"that token is for a {identity.role}; ask for one from `fusion token new --role provider`"
        )
    return identity
