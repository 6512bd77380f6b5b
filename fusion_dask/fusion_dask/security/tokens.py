"""Tokens: what a person hands to a machine that may join, and the broker's book of them.

A token carries an id, a secret of 160 bits, and the SHA-256 of the authority's certificate, so that its
holder recognises the broker before it says the secret. The book keeps a hash of the secret only; a fast
hash is enough for a secret that cannot be guessed.

Covers: making, listing, revoking and redeeming. Not covered: the certificate that a token is redeemed
for (`gateway.py`).

Invariant: whatever processes use the book at once, a token is redeemed at most as often as it may be,
and never after its end or its revocation.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from fusion_dask.errors import SecurityError, TokenRefused
from fusion_dask.security.files import locked, write_private
from fusion_dask.security.roles import Role

__all__ = ["Token", "TokenBook", "TokenRecord"]

SECRET_BYTES: Final = 20
WIRE: Final = re.compile(r"fusion-([0-9a-f]{8})-([a-z2-7]{32})-([a-z2-7]{52})")
HOW: Final = "make one with `fusion token new` on the broker's machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as its holder has it; `str()` is the text to hand over, `repr()` hides the secret."""

    id: str
    secret: bytes = field(repr=False)
    fingerprint: str

    def __str__(self) -> str:
        """`fusion-<id>-<secret>-<fingerprint>`."""
        return f"fusion-{self.id}-{_encode(self.secret)}-{_encode(bytes.fromhex(self.fingerprint))}"

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Read the text of a token.

        Raises:
            SecurityError: It is not one; the message does not repeat it.
        """
        match = WIRE.fullmatch(text.strip())
        if match is None:
            raise SecurityError(
                "that is not a token of this kind (fusion-…-…-…), or a part of it is missing; "
                f"copy all of it, or {HOW}"
            )
        try:
            secret, fingerprint = _decode(match[2]), _decode(match[3])
        except binascii.Error:
            raise SecurityError(f"the token is damaged; copy it again, or {HOW}") from None
        token = cls(id=match[1], secret=secret, fingerprint=fingerprint.hex())
        if str(token) != text.strip():
            # The last letter has bits that mean nothing: a token has one spelling.
            raise SecurityError(f"the token is damaged; copy it again, or {HOW}")
        return token


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """What the book knows of a token; times are Unix seconds.

    Attributes:
        id: Its id.
        digest: SHA-256 of the secret, hexadecimal.
        role: What its holders become.
        label: For people.
        created: When it was made.
        expires: Not valid from then on; None for never.
        uses: How often it may be redeemed; None for any number.
        revoked: When it was revoked, or None.
        serials: Of the certificates that it was redeemed for.
    """

    id: str
    digest: str = field(repr=False)
    role: Role
    label: str
    created: float
    expires: float | None
    uses: int | None
    revoked: float | None = None
    serials: tuple[str, ...] = ()

    @property
    def used(self) -> int:
        """How often it was redeemed."""
        return len(self.serials)

    def refusal(self, now: float) -> str | None:
        """Why it cannot be redeemed, or None if it can."""
        if self.revoked is not None:
            return f"token {self.id} was revoked; {HOW}"
        if self.expires is not None and now >= self.expires:
            return f"token {self.id} has expired; {HOW}"
        if self.uses is not None and self.used >= self.uses:
            return f"token {self.id} was used as often as it may be ({self.uses}); {HOW}"
        return None


class TokenBook:
    """The tokens of a pool, in one JSON file; every method raises SecurityError if it is damaged.

    Args:
        path: The file; made on first use, in a folder that exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def new(
        self,
        *,
        role: Role,
        fingerprint: str,
        expires_s: float | None,
        uses: int | None,
        label: str,
        now: float,
    ) -> Token:
        """Make a token.

        Args:
            role: What its holders become.
            fingerprint: Of the authority's certificate.
            expires_s: Seconds from now until it is no longer valid; None for never.
            uses: How often it may be redeemed; None for any number.
            label: For people.
            now: Unix time in seconds.
        """
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._changing() as records:
            token = Token(id=_unused(records), secret=secret, fingerprint=fingerprint)
            records[token.id] = TokenRecord(
                id=token.id,
                digest=_digest(secret),
                role=role,
                label=label,
                created=now,
                expires=None if expires_s is None else now + expires_s,
                uses=uses,
            )
        return token

    def list(self) -> list[TokenRecord]:
        """All tokens, the oldest first."""
        return sorted(self._read().values(), key=lambda record: record.created)

    def revoke(self, token_id: str, *, now: float) -> TokenRecord:
        """Take a token back, and with it every certificate that it was redeemed for.

        Raises:
            SecurityError: There is no such token.
        """
        with self._changing() as records:
            if token_id not in records:
                raise SecurityError(f"there is no token {token_id}; see `fusion token list`")
            if records[token_id].revoked is None:
                records[token_id] = replace(records[token_id], revoked=now)
            return records[token_id]

    def check(self, token: Token, *, now: float) -> TokenRecord:
        """The record of a token that could be redeemed now.

        Raises:
            TokenRefused: It could not; says why.
        """
        return _checked(self._read(), token, now)

    def redeem(
        self, token: Token, issue: Callable[[TokenRecord], str], *, now: float
    ) -> TokenRecord:
        """Redeem a token for a certificate.

        Args:
            token: The token.
            issue: Called while nobody else can redeem; makes the certificate, returns its serial.
            now: Unix time in seconds.

        Raises:
            TokenRefused: It is unknown, expired, revoked or used up; nothing was issued.
        """
        with self._changing() as records:
            record = _checked(records, token, now)
            records[token.id] = replace(record, serials=(*record.serials, issue(record)))
            return records[token.id]

    def revoked_serials(self) -> frozenset[str]:
        """Of the certificates whose token was revoked."""
        return frozenset(
            serial
            for record in self._read().values()
            if record.revoked is not None
            for serial in record.serials
        )

    def _read(self) -> dict[str, TokenRecord]:
        try:
            plain = json.loads(self._path.read_text())
            return {
                values["id"]: TokenRecord(
                    **{**values, "role": Role(values["role"]), "serials": tuple(values["serials"])}
                )
                for values in plain
            }
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            # Joiners read this too: where it lies is not their business. Without it nobody knows what
            # was revoked, so it is not begun anew.
            raise SecurityError(
                f"the broker's token book {self._path.name} is damaged ({error}); put its backup back "
                "into the broker's folder, or make a new pool in another FUSION_HOME"
            ) from None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, TokenRecord]]:
        with locked(self._path.with_suffix(".lock")):
            records = self._read()
            yield records
            plain = [asdict(record) for record in records.values()]
            write_private(self._path, json.dumps(plain, indent=1).encode())


def _checked(records: dict[str, TokenRecord], token: Token, now: float) -> TokenRecord:
    record = records.get(token.id)
    # Compared also when the id is unknown, so that both answers take as long.
    known = hmac.compare_digest(_digest(token.secret), record.digest if record else "0" * 64)
    if record is None or not known:
        raise TokenRefused(f"this broker did not make token {token.id}; {HOW}")
    if (reason := record.refusal(now)) is not None:
        raise TokenRefused(reason)
    return record


def _unused(records: dict[str, TokenRecord]) -> str:
    while (token_id := secrets.token_hex(4)) in records:
        pass
    return token_id


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _encode(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _decode(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
