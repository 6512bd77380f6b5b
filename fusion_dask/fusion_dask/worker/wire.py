"""Tensors on the wire: dtype, shape and raw bytes; no pickle.

Stock Dask refuses bfloat16 and copies what is not contiguous; here every dtype of the graph travels,
and the bytes of a contiguous CPU tensor are sent from where they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distributed.protocol.serialize import to_serialize

from fusion_dask.graph.ir import DTYPE_BYTES

__all__ = ["pack", "unpack"]


def pack(tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Messages for `unpack`; the tensors are on the CPU and must not change until sent."""
    return [
        {
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": list(t.shape),
            "data": to_serialize(t.contiguous().reshape(-1).view(torch.uint8).numpy().data),
        }
        for t in tensors
    ]


def unpack(messages: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Tensors that own the received memory.

    Raises:
        ValueError: A dtype or a size does not fit.
    """
    return [_unpack(m) for m in messages]


def _unpack(message: Mapping[str, Any]) -> torch.Tensor:
    name, shape = message["dtype"], [int(n) for n in message["shape"]]
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is not one that a boundary tensor has")
    dtype = getattr(torch, name)
    data = memoryview(message["data"])
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    buffer = bytearray(data) if data.readonly else data
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)
