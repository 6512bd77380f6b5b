"""The zarr stores that record and verify keep to it for every way in."""

import uuid

import pytest
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.buffer.cpu import Buffer
from zarr.core.sync import sync

from fusion_storage.errors import IntegrityError
from fusion_storage.store import open_store
from fusion_storage.verified import RecordingStore, VerifyingStore

PROTOTYPE = default_buffer_prototype()


@pytest.fixture
def inner() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}").zarr("arrays")


def write(store: Store, key: str, data: bytes) -> None:
    sync(store.set(key, Buffer.from_bytes(data)))


def test_recorded_bytes_are_never_replaced_or_removed(inner: Store) -> None:
    recording = RecordingStore(inner)
    write(recording, "a/c", b"1")
    write(recording, "a/c", b"1")
    with pytest.raises(ValueError, match="written twice"):
        write(recording, "a/c", b"2")
    with pytest.raises(ValueError, match="immutable"):
        sync(recording.delete("a/c"))
    with pytest.raises(ValueError, match="immutable"):
        sync(recording.delete_dir("a"))
    sync(recording.set_if_not_exists("a/c", Buffer.from_bytes(b"3")))
    assert sync(inner.get("a/c", PROTOTYPE)).to_bytes() == b"1"  # type: ignore[union-attr]
    assert {key: size for key, (size, _) in recording.files.items()} == {"a/c": 1}


def test_recording_store_sees_only_its_own_writes(inner: Store) -> None:
    write(inner, "zarr.json", b"{}")
    recording = RecordingStore(inner)
    assert sync(recording.get("zarr.json", PROTOTYPE)) is None
    assert not sync(recording.exists("zarr.json"))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (None, b"abcdef"),
        (RangeByteRequest(1, 3), b"bc"),
        (OffsetByteRequest(4), b"ef"),
        (SuffixByteRequest(2), b"ef"),
        (SuffixByteRequest(9), b"abcdef"),
    ],
)
def test_parts_are_cut_from_verified_wholes(
    inner: Store,
    part: RangeByteRequest | OffsetByteRequest | SuffixByteRequest | None,
    expected: bytes,
) -> None:
    recording = RecordingStore(inner)
    write(recording, "a", b"abcdef")
    verifying = VerifyingStore(inner, recording.files, place="here/")
    for store in (inner, verifying):
        (found,) = sync(store.get_partial_values(PROTOTYPE, [("a", part)]))
        assert found is not None
        assert found.to_bytes() == expected
    write(inner, "a", b"abcdeX")
    with pytest.raises(IntegrityError, match="here/a"):
        sync(verifying.get("a", PROTOTYPE, RangeByteRequest(0, 1)))


def test_verifying_store_is_the_record_and_nothing_else(inner: Store) -> None:
    recording = RecordingStore(inner)
    write(recording, "a/c/0", b"1")
    write(recording, "zarr.json", b"{}")
    write(inner, "a/stray", b"1")
    verifying = VerifyingStore(inner, recording.files)

    async def listed() -> list[list[str]]:
        return [
            [key async for key in verifying.list()],
            [key async for key in verifying.list_prefix("a/")],
            [key async for key in verifying.list_dir("")],
            [key async for key in verifying.list_dir("a")],
        ]

    assert sync(listed()) == [["a/c/0", "zarr.json"], ["a/c/0"], ["a", "zarr.json"], ["c"]]
    assert not sync(verifying.exists("a/stray"))
    with pytest.raises(IntegrityError, match="does not list it"):
        sync(verifying.get("a/stray", PROTOTYPE))
    assert sync(verifying.get("b/zarr.json", PROTOTYPE)) is None
    with pytest.raises(ValueError, match="read-only"):
        write(verifying, "x", b"")
    with pytest.raises(ValueError, match="read only"):
        verifying.with_read_only(False)
