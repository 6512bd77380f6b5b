"""Read the tensors of one stage from a safetensors checkpoint, by name.

Covers a single file and a folder, sharded or not, as `transformers` writes them. A tied parameter
is found under any of its names. Only the tensors that are asked for are read, so that a stage of a
large model loads on a machine that could not hold the model.

Does not cover checkpoints whose tensors are laid out otherwise than the model's parameters
(experts stored one by one), nor this project's own training checkpoints (`fusion_storage`).

Invariant: what is returned has the declared shape and dtype, or there is an error.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fusion_dask.errors import WeightsError
from fusion_dask.graph.ir import Buffer, Parameter

__all__ = ["read_weights"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_weights(
    source: Path, parts: Iterable[Parameter | Buffer], *, device: str = "cpu"
) -> dict[str, Tensor]:
    """Read parameters and buffers of a graph or of a stage program.

    Args:
        source: A safetensors file, or a folder with `model.safetensors` or with shards and their
            `model.safetensors.index.json`.
        parts: What to read. Its dtype wins over that of the file.
        device: Where the tensors go.

    Raises:
        WeightsError: A tensor is missing or has another shape, or a file is damaged.
    """
    files = _files(source)
    by_file: dict[Path, list[tuple[str, Parameter | Buffer]]] = {}
    for part in parts:
        names = (part.name, *(part.aliases if isinstance(part, Parameter) else ()))
        found = next((name for name in names if name in files), None)
        if found is None:
            raise WeightsError(
                f"{source} has no tensor {part.name!r}: it belongs to another model, or the "
                "configuration beside it differs from the one that was captured"
            )
        by_file.setdefault(files[found], []).append((found, part))
    return {
        name: tensor
        for file, wanted in by_file.items()
        for name, tensor in _read(file, wanted, device).items()
    }


def _files(source: Path) -> Mapping[str, Path]:
    """For each tensor of a checkpoint the file that holds it."""
    if source.is_dir() and (source / _INDEX).is_file():
        return _indexed(source)
    file = source / _SINGLE if source.is_dir() else source
    if not file.is_file():
        raise WeightsError(
            f"no weights at {source}: give a safetensors file, or a folder with {_SINGLE} or {_INDEX}"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _indexed(folder: Path) -> Mapping[str, Path]:
    try:
        names = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): folder / Path(str(file)).name for name, file in names.items()}
        plain = all(Path(str(file)).name == file for file in names.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(folder / _INDEX, error) from error
    if not plain:
        raise WeightsError(f"{folder / _INDEX} names files outside of its folder: do not use it")
    return found


def _read(
    file: Path, wanted: Iterable[tuple[str, Parameter | Buffer]], device: str
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt", device=device) as opened:
            for name, part in wanted:
                tensors[part.name] = _fitting(opened.get_tensor(name), part, file)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error
    return tensors


def _fitting(tensor: Tensor, part: Parameter | Buffer, file: Path) -> Tensor:
    if tuple(tensor.shape) != part.spec.shape:
        raise WeightsError(
            f"{part.name!r} is {list(tensor.shape)} in {file} and {list(part.spec.shape)} in the "
            "model: use the configuration that belongs to these weights"
        )
    dtype: torch.dtype = getattr(torch, part.spec.dtype)
    return tensor.to(dtype)


def _damaged(file: Path, error: Exception) -> WeightsError:
    return WeightsError(
        f"{file} cannot be read ({str(error)[:150]}): it is damaged or incomplete; download or copy "
        "it again"
    )
