"""The token book as a person sees it.

Covers: durations, tables and the lines to type. Invariant: only `make_token` ever shows a secret.
"""

import json
import re
import time
from datetime import datetime
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusion_dask.security.identity import GATEWAY_PORT
from fusion_dask.security.roles import Role
from fusion_dask.security.state import BrokerState, load_state
from fusion_dask.security.tokens import TokenBook, TokenRecord
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_tasks import settings

__all__ = ["address_of", "duration_s", "make_token", "revoke_token", "show_tokens"]

UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: Longer ones say `never`.
LONGEST_S: Final = 36500 * 86400.0
LABEL: Final = 60


def duration_s(text: str) -> float | None:
    """Seconds of a text such as `30m`; None for `never`.

    >>> duration_s("24h"), duration_s("never")
    (86400.0, None)

    Raises:
        InputError: It is not of that form.
    """
    if text == "never":
        return None
    match = re.fullmatch(r"(\d+)([smhd])", text)
    # An int of any length is slow to read.
    seconds = int(match[1]) * UNITS[match[2]] if match and len(match[1]) < 10 else 0.0
    if not 0.0 < seconds <= LONGEST_S:
        raise InputError(f"{text!r} is no duration; it looks like 30m, 24h or 7d, or never")
    return seconds


def make_token(*, role: str, expires: str, uses: int | None, label: str) -> str:
    """A new token, as the line to type with it.

    Raises:
        InputError: There is no pool here, no such role or duration, or the label is none.
    """
    if role not in {Role.PROVIDER, Role.USER}:
        raise InputError(f"--role {role}: there are provider and user")
    if len(label) > LABEL or not label.isprintable():
        raise InputError(f"--label: take up to {LABEL} characters of one line")
    place, state = _pool()
    token = TokenBook(place.tokens).new(
        role=Role(role),
        fingerprint=place.open_authority(is_new=False).fingerprint,
        expires_s=duration_s(expires),
        uses=uses,
        label=label,
        now=time.time(),
    )
    address = address_of(state)
    if role == Role.USER:
        return f"fusion run pretrain --cluster {address} --token {token}"
    return f"fusion join {address} --token {token}"


def address_of(state: BrokerState) -> str:
    """What to type after `fusion join`."""
    port = "" if state.ports.gateway == GATEWAY_PORT else f":{state.ports.gateway}"
    return f"{state.addresses[0]}{port}"


def show_tokens(*, as_json: bool) -> None:
    """Print the book.

    Raises:
        InputError: There is no pool here.
    """
    place, _ = _pool()
    records, now = TokenBook(place.tokens).list(), time.time()
    if as_json:
        print(json.dumps([_plain(record, now) for record in records], indent=1))  # noqa: T201
        return
    table = Table("id", "role", "label", "made", "expires", "used", "state")
    for record in records:
        of = "" if record.uses is None else f" of {record.uses}"
        table.add_row(
            record.id,
            record.role,
            escape(record.label),
            _time(record.created),
            "never" if record.expires is None else _time(record.expires),
            f"{record.used}{of}",
            _state(record, now),
        )
    Console().print(table)


def revoke_token(token_id: str) -> str:
    """Take a token back; says what that did.

    Raises:
        InputError: There is no pool here.
        SecurityError: There is no such token.
    """
    place, _ = _pool()
    record = TokenBook(place.tokens).revoke(token_id, now=time.time())
    return f"token {record.id} is revoked; {record.used} certificates of it open nothing any more"


def _pool() -> tuple[BrokerPlace, BrokerState]:
    place = BrokerPlace(home=settings.current().home)
    state = load_state(place.folder)
    if state is None:
        raise InputError(
            f"there is no pool in {place.home}; `fusion up` makes one, on the broker's machine"
        )
    return place, state


def _plain(record: TokenRecord, now: float) -> dict[str, object]:
    return {
        "id": record.id,
        "role": record.role,
        "label": record.label,
        "created": record.created,
        "expires": record.expires,
        "uses": record.uses,
        "used": record.used,
        "state": _state(record, now),
    }


def _state(record: TokenRecord, now: float) -> str:
    if record.refusal(now) is None:
        return "valid"
    if record.revoked is not None:
        return "revoked"
    return "expired" if record.expires is not None and now >= record.expires else "used up"


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M")
