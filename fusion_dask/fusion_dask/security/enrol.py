"""Becoming a member: a token and the broker's address in, an identity out.

The authority's certificate is fetched first, over a connection that proves nothing, and has to be the one
whose fingerprint the token carries. Only then, over a connection that trusts that authority alone, is
the token said.

Covers: the joiner's side of `gateway.py`. Not covered: what a member does then.

Invariant: the secret of a token is never sent to anybody but the broker that made it.
"""

import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from fusion_dask.errors import EnrolmentError, SecurityError, TokenRefused, VersionMismatch
from fusion_dask.security.authority import fingerprint_of, make_key_and_csr
from fusion_dask.security.identity import Identity, host_and_port, pool_folder, save
from fusion_dask.security.roles import Role
from fusion_dask.security.tokens import Token
from fusion_dask.security.versions import versions

__all__ = ["ask_health", "enrol"]

CA_BYTES: Final = 64 * 1024


def enrol(address: str, token: str, *, name: str, home: Path, timeout_s: float = 10.0) -> Identity:
    """Join a pool, and keep the membership in `home`.

    Args:
        address: `HOST[:PORT]` of the gateway.
        token: The text of a token.
        name: What this member is called.
        home: Memberships are kept below it.
        timeout_s: Longest wait for any answer.

    Raises:
        SecurityError: Address or token are malformed.
        EnrolmentError: Nobody answers, or not the broker that made the token.
        TokenRefused: The broker does not accept the token; says why.
        VersionMismatch: This machine has other versions; says what to install.
    """
    host, port = host_and_port(address)
    parsed = Token.parse(token)
    url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    ca_pem = _fetch_ca(url, parsed, timeout_s)
    key_pem, csr_pem = make_key_and_csr(name)
    request = {
        "token": str(parsed),
        "csr": csr_pem.decode(),
        "name": name,
        "versions": versions(),
    }
    answer = _ask(url, ca_pem, request, timeout_s)
    folder = pool_folder(home, host, port, Role(answer["role"]))
    identity = _identity(answer, host, port, folder, name)
    certificate_pem = str(answer["certificate"]).encode()
    save(identity, key_pem=key_pem, certificate_pem=certificate_pem, ca_pem=ca_pem)
    return identity


def ask_health(identity: Identity, *, timeout_s: float = 5.0) -> tuple[Mapping[str, Any], float]:
    """The gateway's `/health`, and how far this clock is behind the broker's, in seconds.

    Raises:
        EnrolmentError: It does not answer.
    """
    context = ssl.create_default_context(cafile=str(identity.ca))
    url = f"https://{identity.address}"
    with httpx.Client(verify=context, timeout=timeout_s, trust_env=False) as client:
        before = time.time()
        try:
            answer = client.get(f"{url}/health").raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise EnrolmentError(_unreachable(url, error)) from None
        return answer, float(answer["time"]) - (before + time.time()) / 2


def _fetch_ca(url: str, token: Token, timeout_s: float) -> bytes:
    # Whoever answers proves himself by the fingerprint, below.
    with httpx.Client(verify=_trusting_nobody(), timeout=timeout_s, trust_env=False) as client:
        try:
            ca_pem = _read(client, f"{url}/ca")
        except httpx.HTTPError as error:
            raise EnrolmentError(_unreachable(url, error)) from None
    try:
        found = fingerprint_of(ca_pem)
    except SecurityError as error:
        raise EnrolmentError(f"{url} is not a Fusion broker: {error}") from None
    if found != token.fingerprint:
        raise EnrolmentError(
            f"{url} is not the broker that made this token: its certificate authority is another "
            "one. Check the address; if it is right, somebody is in between, or the broker was set "
            "up anew and you need a new token"
        )
    return ca_pem


def _read(client: httpx.Client, url: str) -> bytes:
    """A short answer: who has not proved himself yet does not get to fill our memory."""
    body = bytearray()
    with client.stream("GET", url) as answer:
        for part in answer.raise_for_status().iter_raw():
            body += part
            if len(body) > CA_BYTES:
                raise EnrolmentError(f"{url} answers more than a Fusion broker would")
    return bytes(body)


def _ask(url: str, ca_pem: bytes, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    context = ssl.create_default_context(cadata=ca_pem.decode())
    with httpx.Client(verify=context, timeout=timeout_s, trust_env=False) as client:
        try:
            answer = client.post(f"{url}/enrol", json=request)
            plain: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EnrolmentError(_unreachable(url, error)) from None
    if answer.status_code == httpx.codes.OK:
        return plain
    message = str(plain.get("message"))
    kinds = {"token": TokenRefused, "versions": VersionMismatch}
    raise kinds.get(str(plain.get("error")), EnrolmentError)(message)


def _identity(answer: Mapping[str, Any], host: str, port: int, folder: Path, name: str) -> Identity:
    ports = answer["ports"]
    shown = f"[{host}]" if ":" in host else host
    secrets = dict(answer["secrets"])
    own_store = ports["store"] is not None
    if own_store:
        secrets["AWS_ENDPOINT_URL"] = f"https://{shown}:{ports['store']}"
    return Identity(
        folder=folder,
        role=Role(answer["role"]),
        name=name,
        host=host,
        gateway_port=port,
        scheduler=f"tls://{shown}:{ports['scheduler']}",
        prefect_url=f"https://{shown}:{ports['prefect']}/api",
        store=answer["store"],
        own_store=own_store,
        secrets=secrets,
        expires=float(answer["expires"]),
    )


def _trusting_nobody() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _unreachable(url: str, error: Exception) -> str:
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"the certificate of {url} is not for that address ({text}); start the broker with "
            "`fusion up --address` and the name or address that you use, or use one that it prints"
        )
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
        return f"{url} does not speak TLS: that is not the gateway of a Fusion broker"
    return (
        f"no Fusion broker answers at {url} ({text or type(error).__name__}); is `fusion up` running "
        "there, is the address right, and does a firewall let the port through?"
    )
