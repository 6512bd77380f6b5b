"""One `fusion join` from its options to its end: what has to happen before Dask is imported.

Invariant: a token that was given is used, so that a person sees whether it is valid; without one an
earlier membership is.
"""

import os

from fusion_dask.errors import SecurityError
from fusion_dask.security.enrol import enrol
from fusion_dask.security.identity import Identity, find
from fusion_dask.security.roles import Role
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.membership import as_member
from fusion_flows.cli.provider.request import JoinRequest, shares_of, window_of
from fusion_tasks import settings

__all__ = ["execute"]


def execute(request: JoinRequest, token: str | None) -> None:
    """Check, become a member, lend.

    Raises:
        CliError: For the caller to print.
        FusionError: The same.
    """
    shares, window = shares_of(request), window_of(request)
    identity = _membership(request, token)
    os.environ.update(as_member(identity))
    from fusion_flows.cli.provider.lend import lend

    lend(identity, shares, name=request.name, window=window, backup=request.backup)


def _membership(request: JoinRequest, token: str | None) -> Identity:
    home = settings.current().home
    if token is None:
        known = find(home, request.address, Role.PROVIDER)
        if known is None:
            raise InputError(
                f"this machine is no member of the pool at {request.address}, or not any more; join "
                "with --token and a token from `fusion token new` on the broker's machine"
            )
        return known
    identity = enrol(request.address, token, name=request.name, home=home)
    if identity.role is not Role.PROVIDER:
        raise SecurityError(
            f"that token is for a {identity.role}; ask for one from `fusion token new --role provider`"
        )
    return identity
