"""Roles: what a certificate says its holder is.

The role is the organisational unit (OU) of the certificate's subject, the member's name its common name
(CN); the broker's authority writes both, whatever a request claims.

Covers: reading them from what `ssl` tells of a peer. Not covered: what a role may do (`guard.py`).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

__all__ = ["Role", "name_of", "role_of", "serial_of"]


class Role(StrEnum):
    """Who somebody is in the pool."""

    BROKER = "broker"
    PROVIDER = "provider"
    USER = "user"


def role_of(peercert: Mapping[str, Any]) -> Role | None:
    """The role in a certificate, as `SSLSocket.getpeercert()` gives it; None if it has none of ours."""
    for relative in peercert.get("subject", ()):
        for key, value in relative:
            if key == "organizationalUnitName" and value in set(Role):
                return Role(value)
    return None


def name_of(peercert: Mapping[str, Any]) -> str | None:
    """The member's name in a certificate."""
    for relative in peercert.get("subject", ()):
        for key, value in relative:
            if key == "commonName":
                return str(value)
    return None


def serial_of(peercert: Mapping[str, Any]) -> str:
    """The serial number of a certificate: lower-case hexadecimal without leading zeros."""
    return f"{int(peercert['serialNumber'], 16):x}"
