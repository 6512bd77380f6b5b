"""The identity of a member: its certificate, and how it reaches the pool.

Covers: the folder that keeps it, and the environment that makes Dask, Prefect and the store use it. Not
covered: obtaining it (`enrol.py`).

Invariant: the folder and what is in it belong to its owner alone; no secret is in `repr`.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fusion_dask.errors import SecurityError
from fusion_dask.security.files import make_private_folder, write_private
from fusion_dask.security.roles import Role

__all__ = [
    "GATEWAY_PORT",
    "Identity",
    "damaged",
    "find",
    "host_and_port",
    "load",
    "pool_folder",
    "pools",
    "save",
]

GATEWAY_PORT: Final = 8788
#: Of a host's name in the DNS, and of each of its parts.
NAME_LENGTH: Final = 253
PART_LENGTH: Final = 63
#: The fields that others do arithmetic or look-ups with.
KINDS: Final = {
    "name": str,
    "host": str,
    "gateway_port": int,
    "scheduler": str,
    "prefect_url": str,
    "store": str,
    "secrets": dict,
    "expires": float,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A membership.

    Attributes:
        folder: Holds the key, the certificate and the authority's certificate.
        role: What the certificate says.
        name: What the certificate says.
        host: By which the broker is reached.
        gateway_port: Port of its gateway.
        scheduler: Address of the Dask scheduler, `tls://host:port`.
        prefect_url: Address of the Prefect API.
        store: URL of the store.
        own_store: Whether the store is the pool's, with a certificate of its authority.
        secrets: Environment variables with the secrets of the services.
        expires: Unix time in seconds; the certificate is not valid from then on.
    """

    folder: Path
    role: Role
    name: str
    host: str
    gateway_port: int
    scheduler: str
    prefect_url: str
    store: str
    own_store: bool
    secrets: Mapping[str, str] = field(repr=False)
    expires: float

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The member's certificate."""
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        """The member's private key."""
        return self.folder / "key.pem"

    @property
    def address(self) -> str:
        """`host:port` of the gateway."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.gateway_port}"

    def as_environment(self) -> dict[str, str]:
        """The variables that make a process and its children a part of the pool."""
        tls = "DASK_DISTRIBUTED__COMM__TLS__"
        pair = {"CERT": str(self.certificate), "KEY": str(self.key)}
        variables = {
            "FUSION_CLUSTER": self.scheduler,
            "FUSION_STORE": self.store,
            "PREFECT_API_URL": self.prefect_url,
            "PREFECT_API_SSL_CERT_FILE": str(self.ca),
            "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
            f"{tls}CA_FILE": str(self.ca),
        }
        for part in ("WORKER", "CLIENT", "SCHEDULER"):
            variables |= {f"{tls}{part}__{name}": path for name, path in pair.items()}
        if self.own_store:
            variables["AWS_CA_BUNDLE"] = str(self.ca)
        # What else the shell knows of other stores must not be mixed with the pool's.
        if "AWS_ACCESS_KEY_ID" in self.secrets:
            variables["AWS_SESSION_TOKEN"] = ""
        if "AWS_ENDPOINT_URL" in self.secrets:
            variables["AWS_ENDPOINT_URL_S3"] = self.secrets["AWS_ENDPOINT_URL"]
        return variables | dict(self.secrets)


def save(identity: Identity, *, key_pem: bytes, certificate_pem: bytes, ca_pem: bytes) -> None:
    """Write an identity to its folder."""
    make_private_folder(identity.folder)
    # What is there without it is no membership: a key may not fit its certificate yet.
    (identity.folder / "pool.json").unlink(missing_ok=True)
    write_private(identity.ca, ca_pem)
    write_private(identity.key, key_pem)
    write_private(identity.certificate, certificate_pem)
    plain = {
        name: getattr(identity, name) for name in Identity.__dataclass_fields__ if name != "folder"
    }
    plain["secrets"] = dict(identity.secrets)
    write_private(identity.folder / "pool.json", json.dumps(plain, indent=1).encode())


def load(folder: Path) -> Identity:
    """Read an identity; whether its certificates are any is seen when they are used.

    Raises:
        SecurityError: There is none, or it is damaged.
    """
    try:
        plain: dict[str, Any] = json.loads((folder / "pool.json").read_text())
        identity = Identity(**{**plain, "role": Role(plain["role"]), "folder": folder})
        _check(plain)
        for path in (identity.ca, identity.certificate, identity.key):
            path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, error) from None
    return identity


def _check(plain: dict[str, Any]) -> None:
    for name, kind in KINDS.items():
        if not isinstance(plain[name], kind):
            raise TypeError(f"{name} is not of the type {kind.__name__}")


def damaged(folder: Path, error: Exception) -> SecurityError:
    """What to say of a membership that cannot be used."""
    return SecurityError(
        f"the membership in {folder} is damaged ({error}); remove that folder, then join again with a "
        "token, or call `fusion up` on the broker's machine"
    )


def pools(home: Path) -> list[Identity]:
    """The memberships of a home whose certificate is still valid, by role and address.

    Raises:
        SecurityError: One is damaged.
    """
    folders = sorted(path.parent for path in (home / "pools").glob("*/pool.json"))
    return [identity for identity in map(load, folders) if identity.expires > time.time()]


def find(home: Path, address: str, role: Role) -> Identity | None:
    """The membership in a role of the pool whose gateway is `address`, or None.

    Raises:
        SecurityError: The address is not one, or that membership is damaged.
    """
    host, port = host_and_port(address)
    wanted = pool_folder(home, host, port, role)
    if not (wanted / "pool.json").exists():
        return None
    identity = load(wanted)
    return identity if identity.expires > time.time() else None


def pool_folder(home: Path, host: str, port: int, role: Role) -> Path:
    """Where a membership of a pool is kept: a machine may be a provider and a user of one pool."""
    return home / "pools" / f"{role}-{host.replace(':', '_')}-{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `HOST[:PORT]`; the gateway's usual port if there is none.

    >>> host_and_port("192.0.2.7"), host_and_port("[2001:db8::1]:99")
    (('192.0.2.7', 8788), ('2001:db8::1', 99))

    Raises:
        SecurityError: It is not of that form.
    """
    host, port = address.strip(), ""
    if host.startswith("[") and "]" in host:
        host, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    is_port = not port or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    is_long = len(host) > NAME_LENGTH or any(len(p) > PART_LENGTH for p in host.split("."))
    if not host or not is_port or is_long or any(c in host for c in "/@ []"):
        raise SecurityError(
            f"{address!r} is not an address; it looks like 192.0.2.7 or gpu-box.example:{GATEWAY_PORT}"
        )
    return host, int(port or GATEWAY_PORT)
