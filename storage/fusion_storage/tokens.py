"""A tokenised corpus: a flat array of token ids, written once, read in random windows.

    corpora/<name>/<digest>/...         a zarr array of uint16 or uint32
    corpora/<name>/manifest.json        length, digest and the record of every object, written last

Covers ids only; splitting, shuffling and batching are the caller's. Invariant: `read` returns the
ids that were written or raises; each chunk is verified when it is loaded, and only then.
"""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from fusion_storage.errors import CommitConflict, IntegrityError, NotFound
from fusion_storage.names import BLOB_NAME, check_name
from fusion_storage.sealed import seal, unseal
from fusion_storage.store import Store
from fusion_storage.verified import Files, RecordingStore, VerifyingStore

__all__ = ["TokenArray", "write_tokens"]

_CHUNK_BYTES = 2 * 2**20
_CACHE_BYTES = 256 * 2**20
_DIGEST_DIGITS = 16
_DTYPES = ("uint16", "uint32")


def write_tokens(store: Store, name: str, ids: np.ndarray[Any, Any]) -> None:
    """Write a corpus under its name; the same ids again are no second write.

    Args:
        store: Where to.
        name: A name that stands for the content, such as a hash of text and tokenizer.
        ids: One-dimensional, uint16 or uint32.

    Raises:
        ValueError: the ids have another shape or dtype.
        CommitConflict: the store holds other ids under this name.
    """
    if ids.ndim != 1 or ids.dtype.name not in _DTYPES:
        raise ValueError(f"token ids must be 1-d uint16 or uint32, not {ids.ndim}-d {ids.dtype}")
    ids = np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("<"))
    digest = _digest(ids)
    conflict = CommitConflict(f"corpus {name}", "name a corpus after its content")
    known = store.read(_manifest_key(name))
    if known is not None:
        if _Manifest.parse(known, name).digest != digest:
            raise conflict
        return
    # The digest in the path keeps two different corpora apart that race for one name.
    prefix = f"{_corpus_prefix(name)}/{digest[:_DIGEST_DIGITS]}"
    recording = RecordingStore(store.zarr(prefix))
    array = zarr.create_array(
        recording,
        shape=ids.shape,
        dtype=ids.dtype,
        chunks=(_CHUNK_BYTES // ids.dtype.itemsize,),
        filters=(),
        compressors=(Crc32cCodec(),),
        fill_value=0,
        zarr_format=3,
        config={"write_empty_chunks": True},
    )
    array[...] = ids
    store.flush(prefix)
    manifest = _Manifest(prefix=prefix, digest=digest, length=len(ids), files=recording.files)
    if not store.create(_manifest_key(name), manifest.seal(name)):
        raise conflict


class TokenArray:
    """A written corpus, opened lazily; safe to share between threads and to pickle."""

    def __init__(self, store: Store, name: str, *, cache_bytes: int = _CACHE_BYTES) -> None:
        """Name a corpus; nothing is read yet.

        Args:
            store: Where it is.
            name: As given to `write_tokens`.
            cache_bytes: How many bytes of chunks to hold; at least one chunk is held.
        """
        check_name("corpus", name, BLOB_NAME)
        self._store = store
        self._name = name
        self._cache_bytes = cache_bytes
        self._opened: _Opened | None = None
        self._chunks: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of ids.

        Raises:
            NotFound: there is no such corpus.
        """
        return self._open().length

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids."""
        return self._open().array.dtype

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Return `count` ids from `start` on, in memory of their own.

        Raises:
            IndexError: the window does not lie within the corpus.
            IntegrityError: a chunk is missing, short or altered.
        """
        opened = self._open()
        stop = start + count
        if start < 0 or count < 0 or stop > opened.length:
            raise IndexError(f"window {start}:{stop} is not within the {opened.length} ids")
        window = np.empty(count, opened.dtype)
        done = 0
        while done < count:
            number, offset = divmod(start + done, opened.chunk_ids)
            piece = self._chunk(opened, number)[offset : offset + count - done]
            window[done : done + len(piece)] = piece
            done += len(piece)
        return window

    def _chunk(self, opened: "_Opened", number: int) -> np.ndarray[Any, Any]:
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is not None:
                self._chunks.move_to_end(number)
                return chunk
        first = number * opened.chunk_ids
        chunk = np.asarray(opened.array[first : first + opened.chunk_ids])
        with self._lock:
            # Two threads may have loaded it at once; the later one replaces the other.
            self._chunks[number] = chunk
            held = sum(each.nbytes for each in self._chunks.values())
            while held > self._cache_bytes and len(self._chunks) > 1:
                held -= self._chunks.popitem(last=False)[1].nbytes
        return chunk

    def _open(self) -> "_Opened":
        if self._opened is None:
            self._opened = _open(self._store, self._name)
        return self._opened

    def __reduce__(self) -> tuple[Any, ...]:
        """Carry the name over, neither chunks nor lock."""
        return partial(TokenArray, cache_bytes=self._cache_bytes), (self._store, self._name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A corpus whose manifest was read."""

    array: zarr.Array[Any]
    length: int
    chunk_ids: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    prefix: str
    digest: str
    length: int
    files: Files

    def seal(self, name: str) -> bytes:
        return seal(
            {
                "corpus": name,
                "prefix": self.prefix,
                "digest": self.digest,
                "length": self.length,
                "files": {key: list(entry) for key, entry in self.files.items()},
            }
        )

    @classmethod
    def parse(cls, data: bytes, name: str) -> "_Manifest":
        key = _manifest_key(name)
        record = unseal(data, key)
        if record.get("corpus") != name:
            raise IntegrityError(key, f"it is the manifest of {record.get('corpus')!r}")
        files = {path: (int(size), str(digest)) for path, (size, digest) in record["files"].items()}
        return cls(
            prefix=record["prefix"],
            digest=record["digest"],
            length=int(record["length"]),
            files=files,
        )


def _open(store: Store, name: str) -> _Opened:
    data = store.read(_manifest_key(name))
    if data is None:
        raise NotFound(f"corpus {name}", store.url, store.children("corpora"))
    manifest = _Manifest.parse(data, name)
    verifying = VerifyingStore(
        store.zarr(manifest.prefix), manifest.files, place=f"{manifest.prefix}/"
    )
    array = zarr.open_array(verifying, mode="r", zarr_format=3)
    return _Opened(
        array=array, length=manifest.length, chunk_ids=array.chunks[0], dtype=array.dtype
    )


def _digest(ids: np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256(f"{ids.dtype.name}\n".encode())
    digest.update(ids.data)
    return digest.hexdigest()


def _corpus_prefix(name: str) -> str:
    return f"corpora/{check_name('corpus', name, BLOB_NAME)}"


def _manifest_key(name: str) -> str:
    return f"{_corpus_prefix(name)}/manifest.json"
