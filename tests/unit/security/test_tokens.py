"""Tokens and their book."""

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.errors import SecurityError, TokenRefused
from fusion_dask.security.roles import Role
from fusion_dask.security.tokens import Token, TokenBook

FINGERPRINT = "ab" * 32


def make(book: TokenBook, *, uses: int | None = None, expires_s: float | None = 60.0) -> Token:
    return book.new(
        role=Role.PROVIDER,
        fingerprint=FINGERPRINT,
        expires_s=expires_s,
        uses=uses,
        label="test",
        now=100.0,
    )


@given(st.binary(min_size=20, max_size=20), st.binary(min_size=32, max_size=32))
def test_the_text_of_a_token_says_all_of_it(secret: bytes, fingerprint: bytes) -> None:
    token = Token(id="0123abcd", secret=secret, fingerprint=fingerprint.hex())
    assert Token.parse(str(token)) == token


@given(st.text(max_size=120))
def test_another_text_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(SecurityError) as caught:
        Token.parse(text)
    assert len(text.strip()) < 8 or text.strip() not in str(caught.value)


def test_a_token_has_one_spelling() -> None:
    token = Token(id="0123abcd", secret=bytes(20), fingerprint=FINGERPRINT)
    refused = 0
    for letter in "abcdefghijklmnopqrstuvwxyz234567".replace(str(token)[-1], ""):
        try:
            assert Token.parse(str(token)[:-1] + letter) != token
        except SecurityError:
            refused += 1
    assert refused == 30


def test_the_secret_shows_nowhere(tmp_path: Path) -> None:
    book = TokenBook(tmp_path / "tokens.json")
    token = make(book)
    secret = str(token).split("-")[2]
    for text in (repr(token), repr(book.list()), (tmp_path / "tokens.json").read_text()):
        assert secret not in text
        assert token.secret.hex() not in text
    assert (tmp_path / "tokens.json").stat().st_mode & 0o777 == 0o600


def test_a_token_is_refused_with_the_reason(tmp_path: Path) -> None:
    book = TokenBook(tmp_path / "tokens.json")
    token = make(book)
    assert book.check(token, now=159.9).label == "test"
    with pytest.raises(TokenRefused, match="has expired"):
        book.check(token, now=160.0)
    wrong = Token(id=token.id, secret=bytes(20), fingerprint=FINGERPRINT)
    with pytest.raises(TokenRefused, match="did not make"):
        book.check(wrong, now=101.0)
    unknown = Token(id="00000000", secret=token.secret, fingerprint=FINGERPRINT)
    with pytest.raises(TokenRefused, match="did not make"):
        book.check(unknown, now=101.0)
    book.redeem(token, lambda record: "5e", now=101.0)
    assert book.revoked_serials() == frozenset()
    book.revoke(token.id, now=102.0)
    with pytest.raises(TokenRefused, match="was revoked"):
        book.redeem(token, lambda record: pytest.fail("issued"), now=103.0)
    assert book.revoked_serials() == {"5e"}
    with pytest.raises(SecurityError, match="no token ffffffff"):
        book.revoke("ffffffff", now=1.0)


def test_a_certificate_that_fails_costs_no_use(tmp_path: Path) -> None:
    book = TokenBook(tmp_path / "tokens.json")
    token = make(book, uses=1)

    def fails(_: object) -> str:
        raise SecurityError("a bad request")

    with pytest.raises(SecurityError, match="a bad request"):
        book.redeem(token, fails, now=101.0)
    assert book.redeem(token, lambda record: "1", now=101.0).used == 1


def _redeem(path: Path, token: Token, serial: int, won: "multiprocessing.Queue[int]") -> None:
    try:
        TokenBook(path).redeem(token, lambda record: f"{serial:x}", now=101.0)
    except TokenRefused:
        won.put(0)
    else:
        won.put(1)


def test_a_token_for_three_is_redeemed_three_times_by_ten_processes(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = make(TokenBook(path), uses=3)
    context = multiprocessing.get_context("fork")
    won = context.Queue()
    racers = [context.Process(target=_redeem, args=(path, token, i, won)) for i in range(1, 11)]
    for racer in racers:
        racer.start()
    results = [won.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join(30)
    assert sum(results) == 3
    assert TokenBook(path).list()[0].used == 3


@pytest.mark.parametrize(
    "text", ["{", "null", "[1]", '{"a": 1}', '[{"id": "x"}]', '[{"id": "x", "role": "king"}]']
)
def test_a_damaged_book_is_said_and_not_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    book = TokenBook(path)
    path.write_text(text)
    for use in (book.list, book.revoked_serials, lambda: make(book)):
        with pytest.raises(SecurityError, match=r"tokens\.json is damaged.*backup") as caught:
            use()
        assert str(tmp_path) not in str(caught.value)
    assert path.read_text() == text
