"""Which pool a command is for.

Covers: `--cluster` and `--token`, and the pool of this home when neither is given. Not covered: raw Dask
addresses, which name a scheduler and no pool.

Invariant: an argument beats the environment, which beats what this home knows; a guess is made only where
there is one pool that answers.
"""

import getpass
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from fusion_dask.errors import SecurityError
from fusion_dask.security.enrol import enrol
from fusion_dask.security.identity import Identity, find, pools
from fusion_dask.security.roles import Role
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.pool.health import checks, context_of

__all__ = ["as_member", "choose_pool", "known_pool", "read_token"]


def _answers(identity: Identity) -> bool:
    return checks(identity)["gateway"]()


def choose_pool(
    home: Path,
    *,
    cluster: str | None,
    token: str | None,
    environ: Mapping[str, str] = os.environ,
    answers: Callable[[Identity], bool] = _answers,
) -> Identity | None:
    """The membership to run a flow with; None where there is no pool, or a raw scheduler is named.

    Args:
        home: Of the memberships.
        cluster: `HOST[:PORT]` of a pool, or a raw `tcp://` or `tls://` address.
        token: To become a member with.
        environ: `FUSION_CLUSTER` in it names a raw address too.
        answers: Whether a pool is up.

    Raises:
        InputError: There is no membership, or several pools answer.
        SecurityError: The token does not make a user.
    """
    if cluster is not None and "://" in cluster:
        return None
    if cluster is not None and token is not None:
        identity = enrol(cluster, token, name=getpass.getuser(), home=home)
        if identity.role is not Role.USER:
            raise SecurityError(
                f"that token is for a {identity.role}, who may not run flows; ask for one from "
                "`fusion token new --role user`"
            )
        return identity
    if token is not None:
        raise InputError("--token is for a pool: name it with --cluster HOST")
    if cluster is not None:
        known = find(home, cluster, Role.USER)
        if known is None:
            raise InputError(
                f"this home has no membership of the pool at {cluster} with which to run flows; add "
                "--token with one from `fusion token new --role user` on the broker's machine"
            )
        return known
    if environ.get("FUSION_CLUSTER"):
        return None
    answering = [identity for identity in _users(home) if answers(identity)]
    if len(answering) > 1:
        there = ", ".join(identity.address for identity in answering)
        raise InputError(f"several pools answer ({there}); choose one with --cluster, or --local")
    return answering[0] if answering else None


def known_pool(home: Path, cluster: str | None) -> Identity:
    """The membership to look at a pool with, in whatever role.

    Raises:
        InputError: There is none, or several.
    """
    if cluster is not None:
        found = [i for role in (Role.USER, Role.PROVIDER) if (i := find(home, cluster, role))]
    else:
        # By its authority: a broker's own machine may have joined by another of its addresses.
        known = {identity.ca.read_bytes(): identity.address for identity in pools(home)}
        if len(known) > 1:
            raise InputError(
                f"this home knows {', '.join(sorted(known.values()))}; name one with --cluster"
            )
        found = sorted(pools(home), key=lambda identity: identity.role is not Role.USER)
    if not found:
        raise InputError(
            "this home is a member of no pool"
            + (f" at {cluster}" if cluster else "")
            + "; start one "
            "with `fusion up`, or join one with `fusion join`"
        )
    return found[0]


def read_token(token: str | None, stdin: TextIO) -> str | None:
    """The token, or what `-` stands for: the first line of standard input.

    Raises:
        InputError: There is none.
    """
    if token != "-":
        return token
    line = stdin.readline().strip()
    if not line:
        raise InputError("--token -: standard input is empty; pipe the token into this command")
    return line


def as_member(identity: Identity, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that belongs to the pool; no proxy is asked for its broker.

    Raises:
        SecurityError: The files of the membership are damaged.
    """
    context_of(identity)
    past = [environ.get("NO_PROXY") or environ.get("no_proxy") or "", identity.host]
    no_proxy = ",".join(part for part in past if part)
    return {
        **environ,
        **identity.as_environment(),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def _users(home: Path) -> list[Identity]:
    return [identity for identity in pools(home) if identity.role is Role.USER]
