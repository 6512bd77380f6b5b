"""Tensors come back bit for bit, whatever their dtype and shape."""

import uuid
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion_storage.names import array_path
from fusion_storage.store import open_store
from fusion_storage.tensors import read_arrays, write_arrays
from fusion_storage.verified import RecordingStore, VerifyingStore

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Make a tensor of random bits: NaN payloads, infinities and negative zeros included."""
    random = np.random.default_rng(seed)
    high = 2 if dtype == torch.bool else 256
    raw = random.integers(0, high, prod(shape) * dtype.itemsize, dtype=np.uint8)
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def round_trip(tensors: dict[str, Tensor], chunk_bytes: int = 2**23) -> dict[str, Tensor]:
    inner = open_store(f"memory://{uuid.uuid4().hex}").zarr("arrays")
    recording = RecordingStore(inner)
    write_arrays(recording, tensors, chunk_bytes=chunk_bytes)
    return read_arrays(VerifyingStore(inner, recording.files), tensors)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert bits(found) == bits(expected)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    seed=st.integers(0, 2**32 - 1),
    chunk_bytes=st.sampled_from([1, 16, 100, 2**23]),
)
@settings(max_examples=120, deadline=None)
def test_round_trip(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, chunk_bytes: int
) -> None:
    tensor = random_tensor(dtype, shape, seed)
    assert_same(round_trip({"t": tensor}, chunk_bytes)["t"], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensors = {str(s): random_tensor(dtype, s, 0) for s in ((), (0,), (5,), (3, 4))}
    for name, found in round_trip(tensors).items():
        assert_same(found, tensors[name])


@given(names=st.sets(st.text(st.characters(codec="utf-8"), min_size=1, max_size=300), max_size=4))
@settings(max_examples=40, deadline=None)
def test_any_name(names: set[str]) -> None:
    tensors = {name: torch.tensor(number) for number, name in enumerate(names)}
    for name, found in round_trip(tensors).items():
        assert_same(found, tensors[name])


@given(
    first=st.text("aA/%.~_2Fé", min_size=1, max_size=8),
    second=st.text("aA/%.~_2Fé", min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_paths_are_distinct_single_plain_segments(first: str, second: str) -> None:
    paths = array_path(first), array_path(second)
    assert (paths[0] == paths[1]) == (first == second)
    assert all("/" not in path and path[0] not in "._" and path.isascii() for path in paths)


def test_paths_of_awkward_names() -> None:
    awkward = ["zarr.json", ".", "..", "__x", "x" * 500, "x" * 501, "c", "c/0"]
    paths = [array_path(name) for name in awkward]
    assert len(set(paths)) == len(awkward)
    assert max(map(len, paths)) <= 200
    assert "zarr.json" not in paths
    with pytest.raises(ValueError, match="needs a name"):
        array_path("")


def test_views_and_parameters_are_written_by_value() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "parameter": torch.nn.Parameter(base.clone()),
        "conjugate": torch.complex(base, base).conj(),
    }
    for name, found in round_trip(tensors).items():
        assert torch.equal(found, tensors[name].detach().resolve_conj()), name
        assert not found.requires_grad
        found.zero_()


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3, device="meta"), torch.eye(3).to_sparse()],
    ids=["meta", "sparse"],
)
def test_tensors_without_plain_values_are_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="tensor 't' must be a plain one"):
        round_trip({"t": tensor})


def test_objects_are_cut_on_the_first_axis_and_not_padded_much() -> None:
    recording = RecordingStore(open_store(f"memory://{uuid.uuid4().hex}").zarr("arrays"))
    write_arrays(recording, {"t": torch.ones(101, 256)}, chunk_bytes=10 * 1024)
    sizes = [size for key, (size, _) in recording.files.items() if "/c." in key]
    assert len(sizes) == 11
    assert max(sizes) <= 10 * 1024 + 4
    assert sum(sizes) < 1.1 * 101 * 1024 + 4 * 11


def test_plain_zarr_reads_the_same_values(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(30, 4), "w/exp_avg": torch.randn(5).to(torch.bfloat16)}
    write_arrays(RecordingStore(open_store(tmp_path).zarr("arrays")), tensors)
    group = zarr.open_group(tmp_path / "arrays", mode="r")
    weight, moment = group["w"], group["w%2Fexp_avg"]
    assert isinstance(weight, zarr.Array)
    assert isinstance(moment, zarr.Array)
    assert np.array_equal(np.asarray(weight[...]), tensors["w"].numpy())
    assert dict(moment.attrs) == {"name": "w/exp_avg", "torch_dtype": "bfloat16"}
    assert bytes(np.asarray(moment[...]).data) == bits(tensors["w/exp_avg"])
