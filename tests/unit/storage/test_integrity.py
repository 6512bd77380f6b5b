"""Whatever happens to an object of a checkpoint, reading says so and names it."""

import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from fusion_storage.checkpoint import Checkpoint, commit, latest, load_checkpoint, read_tensors
from fusion_storage.errors import IntegrityError
from fusion_storage.names import array_path
from fusion_storage.sealed import seal, unseal
from fusion_storage.store import Store, open_store
from unit.storage.contracts import RUN, write_step

MANIFEST = f"runs/{RUN}/checkpoints/00000001.json"


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def checkpoint(store: Store) -> Checkpoint:
    return commit(store, run=RUN, step=1, parts=write_step(store, 1), metadata={})


def objects(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (tensor, key) of every object, and a tensor whose reading has to notice."""
    for part in checkpoint.parts:
        yield part.tensors[0], f"{part.prefix}/zarr.json"
        for name in part.tensors:
            for key in part.files:
                if key.startswith(f"{array_path(name)}/"):
                    yield name, f"{part.prefix}/{key}"


def content(store: Store, key: str) -> bytes:
    data = store.read(key)
    assert data is not None
    return data


def assert_detected(store: Store, checkpoint: Checkpoint, name: str, key: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        read_tensors(checkpoint, store, [name])
    assert caught.value.key == key


def flip(position: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[int(position * (len(data) - 1))] ^= 1
        return bytes(changed)

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first bit": flip(0.0),
    "middle bit": flip(0.5),
    "last bit": flip(1.0),
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte long": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_altered_object(store: Store, checkpoint: Checkpoint, damage: str) -> None:
    tried = 0
    for name, key in objects(checkpoint):
        intact = content(store, key)
        damaged = DAMAGES[damage](intact)
        assert damaged != intact
        store.put(key, damaged)
        assert_detected(store, checkpoint, name, key)
        store.put(key, intact)
        tried += 1
    assert tried == sum(len(part.files) for part in checkpoint.parts)
    read_tensors(checkpoint, store, checkpoint.tensor_names)


def test_missing_object_is_never_zeros(store: Store, checkpoint: Checkpoint) -> None:
    for name, key in objects(checkpoint):
        intact = content(store, key)
        store.delete(key)
        assert_detected(store, checkpoint, name, key)
        store.put(key, intact)


def test_swapped_objects(store: Store, checkpoint: Checkpoint) -> None:
    found = [(n, k, content(store, k)) for n, k in objects(checkpoint)]
    tried = 0
    for name, key, data in found:
        for _, other, other_data in found:
            if len(data) == len(other_data) and data != other_data:
                store.put(key, other_data)
                store.put(other, data)
                assert_detected(store, checkpoint, name, key)
                store.put(key, data)
                store.put(other, other_data)
                tried += 1
    assert tried > 0


def test_chunk_that_the_manifest_forgot_is_never_zeros(store: Store) -> None:
    parts = write_step(store, 1)
    forgotten = f"{array_path('h.0.weight')}/c.0.0"
    record = parts[0].to_json()
    files = record["files"]
    assert isinstance(files, dict)
    del files[forgotten]
    part = type(parts[0]).from_json(record)
    checkpoint = commit(store, run=RUN, step=1, parts=[part, parts[1]], metadata={})
    assert_detected(store, checkpoint, "h.0.weight", f"{part.prefix}/{forgotten}")


def test_every_byte_of_the_manifest_matters(store: Store) -> None:
    part = write_step(store, 1)[0]
    commit(store, run=RUN, step=1, parts=[part], metadata={"loss": 1.5, "name": "ä"})
    intact = content(store, MANIFEST)
    for position in range(len(intact)):
        for bit in (1, 0x20):  # 0x20 turns a letter's case, which hex and JSON may forgive
            damaged = bytearray(intact)
            damaged[position] ^= bit
            store.put(MANIFEST, bytes(damaged))
            with pytest.raises(IntegrityError, match=MANIFEST):
                load_checkpoint(store, RUN, 1)
    for torn in (intact[:-1], intact + b"\n", b"", intact[: len(intact) // 2]):
        store.put(MANIFEST, torn)
        with pytest.raises(IntegrityError, match=MANIFEST):
            latest(store, RUN)


def test_manifest_of_another_step(store: Store, checkpoint: Checkpoint) -> None:
    store.put(f"runs/{RUN}/checkpoints/00000002.json", content(store, MANIFEST))
    with pytest.raises(IntegrityError, match="it is of step 1"):
        latest(store, RUN)


@pytest.mark.parametrize("prefix", ["../../etc", "runs/other/data/00000001/x", "/etc"])
def test_manifest_cannot_point_outside_its_step(store: Store, prefix: str) -> None:
    part = write_step(store, 1)[0]
    commit(store, run=RUN, step=1, parts=[part], metadata={})
    record = unseal(content(store, MANIFEST), MANIFEST)
    record["parts"][0]["prefix"] = prefix
    store.put(MANIFEST, seal(record))
    with pytest.raises(IntegrityError, match="not a manifest"):
        load_checkpoint(store, RUN, 1)


def test_sealed_records_refuse_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="finite"):
        seal({"loss": float("nan")})
    with pytest.raises(ValueError, match="plain JSON"):
        seal({"tensor": torch.ones(1)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="plain JSON"):
        seal({"number": np.float32(1)})  # type: ignore[dict-item]


def test_sealed_bytes_do_not_depend_on_order() -> None:
    assert seal({"a": 1, "b": (1, 2)}) == seal({"b": [1, 2], "a": 1})
    assert unseal(seal({"a": 1, "b": (1, 2)}), "x") == {"a": 1, "b": [1, 2]}
