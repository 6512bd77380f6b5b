"""Named torch tensors as zarr arrays.

One array per tensor, under its own name, whatever partition wrote it. Chunks of about 8 MB along
axis 0 only, each with a CRC-32C, none left out for being zero, nothing compressed. Covers values,
shape and dtype; not device, strides or autograd. Invariant: what is read has the bits that were
written, in memory of its own.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import ceil, prod
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor
from zarr.abc.store import Store
from zarr.codecs import Crc32cCodec

from fusion_storage.names import array_path

__all__ = ["read_arrays", "write_arrays"]

_CHUNK_BYTES = 8 * 2**20
_THREADS = 8

_DTYPE_ATTRIBUTE = "torch_dtype"
_NAME_ATTRIBUTE = "name"

# What numpy can name; every other dtype travels as unsigned integers of its width.
_NATIVE = {
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
_CARRIERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def write_arrays(
    store: Store, tensors: Mapping[str, Tensor], *, chunk_bytes: int = _CHUNK_BYTES
) -> None:
    """Write each tensor as one array into an empty zarr store.

    Args:
        store: Where to.
        tensors: By name.
        chunk_bytes: About how large an object may be; one row of axis 0 is never cut.

    Raises:
        ValueError: a tensor is sparse, quantised or on the meta device.
    """
    zarr.create_group(store, zarr_format=3)
    with ThreadPoolExecutor(_THREADS, "write-tensor") as pool:
        jobs = [pool.submit(_write, store, name, t, chunk_bytes) for name, t in tensors.items()]
        for job in jobs:
            job.result()


def read_arrays(store: Store, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the named tensors into memory of their own, on the CPU."""
    wanted = list(names)
    zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=False)
    with ThreadPoolExecutor(_THREADS, "read-tensor") as pool:
        return dict(zip(wanted, pool.map(lambda name: _read(store, name), wanted), strict=True))


def _write(store: Store, name: str, tensor: Tensor, chunk_bytes: int) -> None:
    values = _to_numpy(name, tensor)
    array = zarr.create_array(
        store,
        name=array_path(name),
        shape=values.shape,
        dtype=values.dtype,
        chunks=_chunks(values.shape, values.dtype.itemsize, chunk_bytes),
        filters=(),
        compressors=(Crc32cCodec(),),
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},  # one folder an array
        zarr_format=3,
        attributes={_NAME_ATTRIBUTE: name, _DTYPE_ATTRIBUTE: _dtype_name(tensor.dtype)},
        config={"write_empty_chunks": True},
    )
    array[...] = values


def _read(store: Store, name: str) -> Tensor:
    array = zarr.open_array(store, path=array_path(name), mode="r", zarr_format=3)
    dtype = _dtype(str(array.attrs[_DTYPE_ATTRIBUTE]))
    values: np.ndarray[Any, Any] = np.require(array[...], requirements=["C", "O", "W"])
    return torch.from_numpy(values).view(dtype)


def _to_numpy(name: str, tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"tensor {name!r} must be a plain one with values: dense, not quantised")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.dtype not in _NATIVE:
        plain = plain.view(_CARRIERS[plain.dtype.itemsize])
    return np.asarray(plain.numpy())


def _chunks(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """Cut axis 0 in equal pieces: zarr pads the last chunk to the size of the others."""
    if not shape:
        return ()
    total = prod(shape) * itemsize
    pieces = max(1, ceil(total / chunk_bytes))
    return (max(1, ceil(shape[0] / pieces)), *(max(1, length) for length in shape[1:]))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"this version of torch has no dtype {name!r}")
