"""A corpus is written once and read in windows."""

import pickle
import time
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_storage.errors import CommitConflict, IntegrityError, NotFound
from fusion_storage.store import Store, open_store
from fusion_storage.tokens import TokenArray, write_tokens

# Three chunks of uint16 and a bit.
LENGTH = 3 * 2**20 + 17


@pytest.fixture(scope="module")
def ids() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 2**16, LENGTH, dtype=np.uint16)


@pytest.fixture(scope="module")
def corpus(ids: np.ndarray[Any, Any]) -> Store:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    write_tokens(store, "books", ids)
    return store


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def test_any_window(corpus: Store, ids: np.ndarray[Any, Any]) -> None:
    tokens = TokenArray(corpus, "books")

    @given(start=st.integers(0, LENGTH), count=st.integers(0, LENGTH))
    @settings(max_examples=60, deadline=None)
    def check(start: int, count: int) -> None:
        count = min(count, LENGTH - start)
        assert np.array_equal(tokens.read(start, count), ids[start : start + count])

    check()


def test_length_and_dtype(corpus: Store, ids: np.ndarray[Any, Any]) -> None:
    tokens = TokenArray(corpus, "books")
    assert len(tokens) == len(ids)
    assert tokens.dtype == np.uint16


@pytest.mark.parametrize("values", [[], [7], list(range(1000))], ids=len)
def test_uint32_and_short_ones(store: Store, values: list[int]) -> None:
    ids = np.array(values, dtype=np.uint32) * 70_000
    write_tokens(store, "c", ids)
    tokens = TokenArray(store, "c")
    assert tokens.dtype == np.uint32
    assert np.array_equal(tokens.read(0, len(tokens)), ids)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1), (LENGTH, 1), (0, LENGTH + 1)])
def test_window_outside(corpus: Store, start: int, count: int) -> None:
    with pytest.raises(IndexError, match="not within"):
        TokenArray(corpus, "books").read(start, count)


def test_written_once(store: Store) -> None:
    ids = np.arange(100, dtype=np.uint16)
    write_tokens(store, "c", ids)
    before = store.sizes()
    write_tokens(store, "c", ids.copy())
    assert store.sizes() == before
    for other in (ids + 1, ids[:-1], ids.astype(np.uint32)):
        with pytest.raises(CommitConflict, match="corpus c"):
            write_tokens(store, "c", other)
    assert np.array_equal(TokenArray(store, "c").read(0, 100), ids)


def test_a_torn_write_is_finished_by_the_next(store: Store) -> None:
    ids = np.arange(100, dtype=np.uint16)
    write_tokens(store, "c", ids)
    store.delete("corpora/c/manifest.json")
    with pytest.raises(NotFound, match="no corpus c"):
        len(TokenArray(store, "c"))
    write_tokens(store, "c", ids)
    assert np.array_equal(TokenArray(store, "c").read(0, 100), ids)


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.uint16), np.zeros(3, np.int64)])
def test_other_shapes_and_dtypes_are_refused(store: Store, ids: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="1-d uint16 or uint32"):
        write_tokens(store, "c", ids)


def test_every_damaged_object_is_named(store: Store) -> None:
    write_tokens(store, "c", np.arange(100, dtype=np.uint16))
    for key in store.list():
        intact = store.read(key)
        assert intact is not None
        for damaged in (intact[:-1], bytes(len(intact)), intact[:-1] + b"\xfe", None):
            store.delete(key)
            if damaged is not None:
                store.put(key, damaged)
            wanted = NotFound if damaged is None and "manifest" in key else IntegrityError
            with pytest.raises(wanted, match="corpus c" if wanted is NotFound else key):
                TokenArray(store, "c").read(0, 100)
        store.put(key, intact)


def test_window_is_a_copy(corpus: Store, ids: np.ndarray[Any, Any]) -> None:
    tokens = TokenArray(corpus, "books")
    tokens.read(5, 10)[:] = 0
    assert np.array_equal(tokens.read(5, 10), ids[5:15])


def test_chunks_are_loaded_once_and_held_within_the_limit(
    store: Store, ids: np.ndarray[Any, Any]
) -> None:
    write_tokens(store, "c", ids)
    tokens = TokenArray(store, "c", cache_bytes=2 * 2**21)
    tokens.read(0, 2**21)
    (folder,) = [name for name in store.children("corpora/c") if name != "manifest.json"]
    store.delete(f"corpora/c/{folder}/c/0")
    assert np.array_equal(tokens.read(3, 100), ids[3:103]), "it was loaded and is still held"
    tokens.read(LENGTH - 20, 20)
    tokens.read(2 * 2**20, 20)
    with pytest.raises(IntegrityError):
        tokens.read(3, 100)


def test_pickled_one_reads_the_same(corpus: Store, ids: np.ndarray[Any, Any]) -> None:
    tokens = TokenArray(corpus, "books")
    tokens.read(0, 10)
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).read(100, 10), ids[100:110])


def test_window_of_a_loaded_chunk_costs_microseconds(corpus: Store) -> None:
    tokens = TokenArray(corpus, "books")
    tokens.read(0, LENGTH)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        for start in range(0, 200_000, 1000):
            tokens.read(start, 1000)
        best_s = min(best_s, (time.perf_counter() - began_s) / 200)
    assert best_s < 100e-6
