"""Whether the services of a pool answer, asked as a member would.

Covers: one check a service. Not covered: what is wrong if one does not (`doctor.py`).

Invariant: every question has a deadline and goes past any proxy.
"""

import http.client
import socket
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from fusion_dask.security.identity import Identity, damaged

__all__ = ["checks", "context_of", "unhealthy"]

TIMEOUT_S: Final = 3.0


def checks(identity: Identity) -> dict[str, Callable[[], bool]]:
    """A question for each service of the pool."""
    made = {
        "gateway": lambda: _get(identity, f"https://{identity.address}/health"),
        "scheduler": lambda: _greets(identity),
        "prefect": lambda: _get(identity, f"{identity.prefect_url}/health"),
    }
    endpoint = identity.secrets.get("AWS_ENDPOINT_URL")
    if identity.own_store and endpoint is not None:
        made["store"] = lambda: _get(identity, f"{endpoint}/status")
    return made


def unhealthy(identity: Identity) -> list[str]:
    """The services that do not answer."""
    return [name for name, check in checks(identity).items() if not check()]


def context_of(identity: Identity) -> ssl.SSLContext:
    """TLS as a member of the pool.

    Raises:
        SecurityError: The files of the membership are damaged.
    """
    try:
        context = ssl.create_default_context(cafile=str(identity.ca))
        context.load_cert_chain(identity.certificate, identity.key)
    except OSError as error:
        raise damaged(identity.folder, error) from None
    return context


def _get(identity: Identity, url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=TIMEOUT_S, context=context_of(identity)
    )
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _greets(identity: Identity) -> bool:
    """Whether something with a certificate of the pool listens where the scheduler should."""
    parts = urlsplit(identity.scheduler)
    try:
        with (
            socket.create_connection((parts.hostname or "", parts.port or 0), TIMEOUT_S) as raw,
            context_of(identity).wrap_socket(raw, server_hostname=parts.hostname) as stream,
        ):
            # Dask's side speaks first.
            return bool(stream.recv(1))
    except OSError:
        return False
