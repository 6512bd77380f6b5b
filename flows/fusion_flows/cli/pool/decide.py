"""What a pool is: the options of `fusion up` over what was kept of the last time.

Covers: address, ports, store and secrets. Not covered: whether they can be had (`setup.py`).

Invariant: without options a pool stays what it was, whatever the environment is now.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fusion_dask.security.state import BrokerState, Ports
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.pool.services import BUCKET

__all__ = ["EVERYWHERE", "HANDED_ON", "UpRequest", "decide"]

EVERYWHERE: Final = "0.0.0.0"
PORTS: Final = Ports(gateway=8788, scheduler=8786, prefect=4200, store=8333, dashboard=8787)
#: What a store of somebody else's needs on every member. Paths and profiles mean nothing elsewhere.
HANDED_ON: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_REQUEST_CHECKSUM_CALCULATION",
    "AWS_RESPONSE_CHECKSUM_VALIDATION",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpRequest:
    """The options of `fusion up`; None is what it was before, or the default."""

    host: str | None = None
    addresses: tuple[str, ...] = ()
    gateway: int | None = None
    scheduler: int | None = None
    prefect: int | None = None
    store_port: int | None = None
    dashboard: int | None = None
    store: str | None = None


def decide(
    request: UpRequest,
    known: BrokerState | None,
    *,
    environ: Mapping[str, str],
    reachable: Sequence[str],
) -> BrokerState:
    """The pool that is asked for.

    Args:
        request: The options.
        known: The pool as it was; None for a new one.
        environ: Taken when a store is named; what it needs is handed to every member.
        reachable: By which others reach a listener on the host, the best first.

    Raises:
        InputError: The options exclude each other.
    """
    if request.store is not None and request.store_port is not None:
        raise InputError("--store-port is for a store of the pool's own, and --store names another")
    had_own = known is None or known.ports.store is not None
    own_store = request.store_port is not None or (request.store is None and had_own)
    before = known.ports if known else PORTS
    named = request.addresses or (known.addresses if known and not request.host else ())
    url = f"s3://{BUCKET}/store"
    if not own_store:
        # Not the pool's own, so either it is named now or it was before.
        url = request.store or (known.store if known else url)
    return BrokerState(
        host=request.host or (known.host if known else EVERYWHERE),
        addresses=tuple(dict.fromkeys([*named, *reachable])),
        ports=Ports(
            gateway=request.gateway or before.gateway,
            scheduler=request.scheduler or before.scheduler,
            prefect=request.prefect or before.prefect,
            store=(request.store_port or before.store or PORTS.store) if own_store else None,
            dashboard=request.dashboard or before.dashboard,
        ),
        store=url,
        secrets={
            **_password(known),
            **(_own(known) if own_store else _foreign(request, known, environ)),
        },
    )


def _password(known: BrokerState | None) -> dict[str, str]:
    name = "PREFECT_API_AUTH_STRING"
    return {name: known.secrets[name] if known else f"fusion:{secrets.token_urlsafe(24)}"}


def _own(known: BrokerState | None) -> dict[str, str]:
    """Credentials of the pool's own store; never those of another one."""
    fresh = {
        "AWS_ACCESS_KEY_ID": f"fusion{secrets.token_hex(8)}",
        "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30),
    }
    if known is None or known.ports.store is None:
        return fresh
    return {name: known.secrets.get(name, secret) for name, secret in fresh.items()}


def _foreign(
    request: UpRequest, known: BrokerState | None, environ: Mapping[str, str]
) -> dict[str, str]:
    kept: dict[str, str] = {}
    if known and known.ports.store is None and request.store in {None, known.store}:
        kept = {name: known.secrets[name] for name in HANDED_ON if name in known.secrets}
    if request.store is None:
        return kept
    return {name: environ[name] for name in HANDED_ON if name in environ} or kept
