import logging
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.errors import FusionError
from fusion_tasks.corpus import Corpus, read_corpus, unigram_entropy
from fusion_tasks.errors import CorpusError


def folder(root: Path) -> Path:
    (root / "b" / "deep").mkdir(parents=True)
    (root / "b" / "deep" / "z.txt").write_text("last\n")
    (root / "b" / "a.md").write_text("middle é\n", encoding="utf-8")
    (root / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\n")
    return root


def test_a_folder_is_read_recursively_in_a_fixed_order(tmp_path: Path) -> None:
    corpus = read_corpus(str(folder(tmp_path / "texts")))
    assert corpus.documents == ("first\r\n", "middle é\n", "last\n")
    assert corpus.name == "texts"
    assert corpus.bytes == 7 + 10 + 5
    assert (corpus.files, corpus.skipped) == (3, 0)


def test_the_digest_is_of_the_documents_and_not_of_the_place(tmp_path: Path) -> None:
    one = read_corpus(str(folder(tmp_path / "one")))
    two = read_corpus(str(folder(tmp_path / "two")))
    assert one.digest == two.digest
    (tmp_path / "two" / "a.txt").write_text("First\n")
    assert read_corpus(str(tmp_path / "two")).digest != one.digest


def test_the_digest_knows_where_a_document_ends(tmp_path: Path) -> None:
    for name, texts in (("one", ("ab", "c")), ("two", ("a", "bc"))):
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / name / str(number)).write_text(text)
    assert read_corpus(str(tmp_path / "one")).digest != read_corpus(str(tmp_path / "two")).digest


def test_what_is_not_text_is_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder(tmp_path)
    (root / "image.bin").write_bytes(b"PNG\0\1\2")
    (root / "latin.txt").write_bytes("café".encode("latin-1"))
    (root / "empty.txt").write_bytes(b"")
    (root / "blank.txt").write_bytes(b" \n")
    (root / ".hidden").write_text("secret")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("secret")
    with caplog.at_level(logging.WARNING):
        corpus = read_corpus(str(root))
    assert (corpus.files, corpus.skipped) == (3, 2)
    assert "2 of 5 files" in caplog.text
    assert "image.bin, latin.txt" in caplog.text
    assert not any("secret" in document for document in corpus.documents)


def test_links_and_pipes_in_a_folder_are_left_out(tmp_path: Path) -> None:
    root = folder(tmp_path / "texts")
    (tmp_path / "outside.txt").write_text("outside")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe.txt")
    assert read_corpus(str(root)).documents == ("first\r\n", "middle é\n", "last\n")


def test_a_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one\ntwo\n")
    corpus = read_corpus(str(path))
    assert corpus.documents == ("one\ntwo\n",)
    assert (corpus.name, corpus.bytes, corpus.files) == ("text", 8, 1)


def test_the_default_is_ten_megabytes_of_real_text() -> None:
    corpus = read_corpus(None)
    assert corpus.bytes >= 10_000_000
    assert corpus.skipped == 0
    assert "standard library" in corpus.name
    assert any("class OrderedDict" in document for document in corpus.documents)
    assert read_corpus(None) == corpus


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"caf\xe9 au lait", "at byte 3"),
        (b"abc\0def", "NUL byte, as binary files have at byte 3"),
        (b"", "holds no text"),
        (b" \n\t", "holds no text"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "input"
    path.write_bytes(data)
    with pytest.raises(CorpusError, match=message) as caught:
        read_corpus(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    for source in (str(tmp_path / "nothing"), "~no-such-person-here/nothing"):
        with pytest.raises(CorpusError, match=r"there is no .*nothing"):
            read_corpus(source)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_folder_without_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "binary").write_bytes(content)
    skipped = 0 if content is None else 1
    with pytest.raises(CorpusError, match=rf"no UTF-8 text \({skipped} "):
        read_corpus(str(tmp_path))


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match="neither a file nor a folder"):
        read_corpus(str(tmp_path / "pipe"))


def test_a_path_that_cannot_be_followed_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CorpusError, match=r"cannot read .*loop"):
        read_corpus(str(tmp_path / "loop"))


def test_an_unreadable_file_of_a_folder_is_an_error_and_not_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder(tmp_path)
    read_bytes = Path.read_bytes

    def deny(path: Path) -> bytes:
        if path.name == "a.md":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    # The permission bits do not stop a superuser, who may run this.
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(CorpusError, match=r"cannot read .*a\.md: Permission denied"):
        read_corpus(str(root))


def test_more_text_than_there_is_room_for_is_refused(tmp_path: Path) -> None:
    root = folder(tmp_path)
    assert read_corpus(str(root), limit_bytes=25).files == 3
    with pytest.raises(CorpusError, match=r"z\.txt takes 25 bytes, and there is room for 24"):
        read_corpus(str(root), limit_bytes=24)


def corpus_of(*documents: str) -> Corpus:
    return Corpus(name="x", documents=documents, bytes=0, files=0, skipped=0, digest="")


@given(st.integers(), st.integers(min_value=0, max_value=50))
def test_the_order_is_a_permutation_that_the_seed_decides(seed: int, count: int) -> None:
    corpus = corpus_of(*map(str, range(count)))
    ordered = corpus.ordered(seed)
    assert sorted(ordered) == sorted(corpus.documents)
    assert ordered == corpus.ordered(seed)


def test_the_order_of_a_seed_never_changes() -> None:
    assert corpus_of(*"abcdefgh").ordered(0) == tuple("dhfcebga")
    assert corpus_of(*"abcdefgh").ordered(1) == tuple("adfegchb")


@given(st.lists(st.integers(min_value=0, max_value=9), min_size=1, max_size=200))
def test_the_entropy_is_that_of_the_frequencies(tokens: list[int]) -> None:
    expected = -sum(
        share * math.log(share)
        for share in (tokens.count(token) / len(tokens) for token in set(tokens))
    )
    for dtype in (np.uint16, np.uint32):
        measured = unigram_entropy(np.array(tokens, dtype=dtype), 10)
        assert measured == pytest.approx(expected, abs=1e-12)


def test_tokens_outside_of_the_vocabulary_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="token 7 is outside"):
        unigram_entropy(np.array([1, 7]), 7)
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy(np.array([], dtype=np.uint16), 7)


def test_errors_are_ours_and_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(CorpusError("there is no x: give a file")))
    assert isinstance(error, FusionError)
    assert str(error) == "there is no x: give a file"
