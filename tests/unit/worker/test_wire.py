"""Every dtype and shape survives the wire, through Dask's own frames."""

import pytest
import torch
from distributed.protocol.serialize import deserialize, serialize
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.graph.ir import DTYPE_BYTES
from fusion_dask.worker.wire import pack, unpack

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES)
def test_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
    raw = torch.arange(size, dtype=torch.int64).to(torch.uint8) % 2
    tensor = (
        raw.view(getattr(torch, dtype)).reshape(shape)
        if size
        else torch.empty(shape, dtype=getattr(torch, dtype))
    )
    message = pack([tensor])[0]
    header, frames = serialize(message["data"].data)

    back = unpack([{**message, "data": deserialize(header, frames)}])[0]

    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert (
        back.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    )


def test_a_strided_tensor_travels_as_its_own_bytes_only() -> None:
    whole = torch.arange(20.0)
    message = pack([whole[::2]])[0]
    assert message["data"].data.nbytes == 40


@pytest.mark.parametrize(
    "message",
    [
        {"dtype": "load", "shape": [1], "data": b"\0" * 4},
        {"dtype": "float32", "shape": [2], "data": b"\0" * 4},
    ],
)
def test_what_does_not_fit_is_refused(message: dict[str, object]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        unpack([message])
