"""Text for training: reading it, fixing its identity and its order, measuring its entropy.

Covers any file or folder of UTF-8 text, and a default that every machine has: the sources of the
running Python's standard library (measured on 3.11 to 3.13: 11 to 12 MB). Does not cover tokens
(`tokenizer`) nor other file formats. Invariant: the same files give the same `Corpus` on every
machine, and nothing but its documents and the seed decides their order.
"""

import hashlib
import logging
import os
import random
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]

from fusion_tasks.errors import CorpusError

__all__ = ["Corpus", "read_corpus", "unigram_entropy"]

logger = logging.getLogger(__name__)

# Tests of the standard library are full of generated tables and foreign text, and Debian ships
# none of them: without them every build of one Python version gives much the same text.
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

# Text, its ids and the copies that joining them makes: about eight times the text, at the peak.
_MEMORY_PER_TEXT_BYTE = 8

_NAMED_SKIPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents and their identity.

    Attributes:
        name: What to call it in reports.
        documents: The texts, none of them empty, folder by folder in the order of the names.
        bytes: Size of the documents in UTF-8.
        files: Files that gave a document.
        skipped: Files that were left out because they are binary or not UTF-8.
        digest: SHA-256 over the documents and their boundaries; paths do not enter it.
    """

    name: str
    documents: tuple[str, ...] = field(repr=False)
    bytes: int
    files: int
    skipped: int
    digest: str

    def ordered(self, seed: int) -> tuple[str, ...]:
        """The documents in the order that the seed gives.

        Only `random.Random.random` is used: of the generators at hand it is the one whose
        sequence is promised to stay across versions, so that a resumed run reads the same text.
        """
        draw = random.Random(seed)
        keys = [draw.random() for _ in self.documents]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return tuple(self.documents[index] for index in order)


def read_corpus(source: str | None, *, limit_bytes: int | None = None) -> Corpus:
    """Read a file or a folder of UTF-8 text.

    A folder is read recursively. Links in it are not followed; entries whose name starts with a
    dot and `__pycache__` are not looked at; files that are binary (hold a NUL byte) or not UTF-8 are
    skipped, counted and logged as a warning; empty files are ignored.

    Args:
        source: The file or folder; None takes the sources of the standard library.
        limit_bytes: Largest amount of text to take; by default what fits in the free memory
            together with its tokens.

    Raises:
        CorpusError: The source is missing, unreadable, empty, too large or holds no UTF-8 text.
    """
    limit = limit_bytes
    if limit is None:
        limit = psutil.virtual_memory().available // _MEMORY_PER_TEXT_BYTE
    if source is None:
        return _standard_library(limit)
    path = Path(os.path.expanduser(source))
    mode = _mode(path)
    if stat.S_ISREG(mode):
        return _one_file(path, limit)
    if stat.S_ISDIR(mode):
        name = path.resolve().name or str(path)
        return _many_files(name, path, _files(path, _is_visible), limit)
    raise CorpusError(f"{path} is neither a file nor a folder: give a file or a folder of text")


def unigram_entropy(ids: npt.NDArray[np.integer], vocab: int) -> float:
    """Entropy of the token frequencies, in nats per token.

    It is the loss of the best model that ignores context, and so the line that training has to
    fall below to have learnt anything from the order of the tokens.

    >>> round(unigram_entropy(np.array([0, 1, 0, 1]), 4), 4)
    0.6931

    Args:
        ids: Token ids, at least one, all below `vocab`.
        vocab: Size of the vocabulary.
    """
    if ids.size == 0:
        raise ValueError("there are no tokens")
    counts = np.bincount(ids, minlength=vocab)
    if counts.size > vocab:
        raise ValueError(f"token {counts.size - 1} is outside of a vocabulary of {vocab}")
    share = counts[counts > 0] / ids.size
    return float(-(share * np.log(share)).sum())


def _standard_library(limit: int) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    version = sysconfig.get_python_version()
    if not root.is_dir():
        raise CorpusError(
            f"this Python {version} has no sources of its standard library to train on: "
            "name a file or a folder of text"
        )
    sources = (path for path in _files(root, _is_library) if path.suffix == ".py")
    return _many_files(f"Python {version} standard library", root, sources, limit)


def _one_file(path: Path, limit: int) -> Corpus:
    data = _read(path, limit)
    try:
        text = _decode(data)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it, "
            "for instance with iconv"
        ) from None
    if not text.strip():
        raise CorpusError(f"{path} holds no text: give a file with some")
    return _corpus(path.name, [text], skipped=0)


def _many_files(name: str, root: Path, paths: Iterable[Path], limit: int) -> Corpus:
    documents: list[str] = []
    skipped: list[Path] = []
    taken_bytes = 0
    for path in paths:
        data = _read(path, limit, taken_bytes)
        try:
            text = _decode(data)
        except UnicodeDecodeError:
            skipped.append(path)
            continue
        if text.strip():
            documents.append(text)
            taken_bytes += len(data)
    if not documents:
        raise CorpusError(
            f"{root} holds no UTF-8 text ({len(skipped)} binary or other files were skipped): "
            "give a folder with text files"
        )
    if skipped:
        shown = ", ".join(str(path.relative_to(root)) for path in skipped[:_NAMED_SKIPS])
        more = ", ..." if len(skipped) > _NAMED_SKIPS else ""
        logger.warning(
            "%d of %d files under %s are not UTF-8 text and were skipped: %s%s",
            len(skipped),
            len(skipped) + len(documents),
            root,
            shown,
            more,
        )
    return _corpus(name, documents, skipped=len(skipped))


def _corpus(name: str, documents: list[str], *, skipped: int) -> Corpus:
    digest = hashlib.sha256()
    total_bytes = 0
    for document in documents:
        data = document.encode()
        total_bytes += len(data)
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return Corpus(
        name=name,
        documents=tuple(documents),
        bytes=total_bytes,
        files=len(documents),
        skipped=skipped,
        digest=digest.hexdigest(),
    )


def _decode(data: bytes) -> str:
    """The text, without a byte order mark; UnicodeDecodeError says where it stops being text."""
    zero = data.find(b"\0")
    if zero >= 0:
        raise UnicodeDecodeError("utf-8", data, zero, zero + 1, "a NUL byte, as binary files have")
    return data.decode("utf-8").removeprefix("\ufeff")


def _read(path: Path, limit: int, taken_bytes: int = 0) -> bytes:
    try:
        size = path.stat().st_size
        if taken_bytes + size > limit:
            raise CorpusError(
                f"the text up to {path} takes {taken_bytes + size} bytes, and there is room for "
                f"{limit}: give a smaller file or folder"
            )
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _files(root: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Regular files below `root` in the order of their paths, links left out."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error) from error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=False):
        folders[:] = sorted(filter(wanted, folders))
        for name in sorted(filter(wanted, names)):
            path = Path(folder, name)
            if stat.S_ISREG(_mode(path, follow_links=False)):
                yield path


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _is_library(name: str) -> bool:
    return _is_visible(name) and name not in _NOT_LIBRARY


def _mode(path: Path, *, follow_links: bool = True) -> int:
    try:
        return path.stat(follow_symlinks=follow_links).st_mode
    except FileNotFoundError:
        raise CorpusError(f"there is no {path}: give a file or a folder of text") from None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(
        f"cannot read {path}: {error.strerror or error}; allow reading it or give another text"
    )
