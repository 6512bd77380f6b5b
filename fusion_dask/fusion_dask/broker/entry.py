"""Who may join: what a worker says of itself is checked before it is believed.

Invariant: what gets in has a name that is safe as a file name, and versions that work with ours.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

from fusion_dask.broker.members import Hello
from fusion_dask.errors import ClusterError, VersionMismatch
from fusion_dask.planner.profile import DeviceKind
from fusion_dask.security.roles import Role, name_of, role_of
from fusion_dask.security.versions import mismatch, versions

__all__ = ["admit", "provider_of"]

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
HERE: Final = versions()


def provider_of(comm: Any) -> str | None:  # noqa: ANN401 - a connection of distributed
    """The provider that a connection's certificate names; None without one, or for another role."""
    certificate = comm.extra_info.get("peercert")
    if certificate is None or role_of(certificate) is not Role.PROVIDER:
        return None
    return name_of(certificate)


def admit(member: Mapping[str, Any]) -> Hello:
    """Check what a worker says of itself.

    Raises:
        VersionMismatch: It runs other versions; the message has the line that fixes it.
        ClusterError: Something else is wrong with it.
    """
    for field in ("name", "provider"):
        if not NAME.fullmatch(str(member.get(field))) or str(member[field]).startswith("."):
            raise ClusterError(
                f"{field} {member.get(field)!r} cannot be used; take 1 to 100 letters, digits, "
                "dots, dashes and underscores, and do not begin with a dot"
            )
    if member.get("kind") not in get_args(DeviceKind):
        raise ClusterError(f"a device of the unknown kind {member.get('kind')!r}")
    if (reason := mismatch(HERE, member.get("versions") or {})) is not None:
        raise VersionMismatch(reason)
    return Hello(
        name=member["name"],
        provider=member["provider"],
        device=str(member.get("device"))[:200],
        kind=member["kind"],
        backup=bool(member.get("backup")),
        probes=bool(member.get("probes")),
    )
