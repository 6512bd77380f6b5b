"""From the MODEL of `fusion graph` to a module with its loss and example inputs.

Covers: the built-in GPT, Hugging Face configurations, and a function in a Python file of the
person's own. Not covered: flows (`targets.py`).

Invariant: a target that cannot be used is an InputError or a FusionError that says what to give.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch import Tensor, nn

from fusion_flows.cli.errors import InputError
from fusion_tasks.models import CausalLoss, load_config, meta_model

__all__ = ["Sizes", "load"]

Loaded = tuple[nn.Module, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the example batch, and of the built-in model."""

    batch: int
    context: int
    layers: int
    width: int
    heads: int
    vocab_size: int


def load(model: str, sizes: Sizes) -> Loaded:
    """The module and one microbatch.

    Raises:
        InputError: The file or function does not exist, fails or returns something else.
        FusionError: The configuration cannot be used.
    """
    path, _, name = model.partition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), name)
    vocabulary = sizes.vocab_size if model == "gpt" else 1
    config = load_config(
        model,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        context=sizes.context,
        vocab_size=vocabulary,
    )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and sizes.context > longest:
        raise InputError(f"{model} takes at most {longest} tokens: give --context {longest}")
    ids_BT = torch.zeros(sizes.batch, sizes.context, dtype=torch.long, device="meta")
    return CausalLoss(meta_model(config)), {"input_ids": ids_BT, "labels": ids_BT}


def _from_file(path: Path, name: str) -> Loaded:
    if not path.is_file():
        raise InputError(f"no file {path}: give an existing one as my/model.py:name")
    if not name:
        raise InputError(f"which function of {path}? give it as {path}:name")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    code = module_from_spec(spec)
    try:
        spec.loader.exec_module(code)
        made = getattr(code, name)()
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}:{name} fails: {type(error).__name__}: {error}") from error
    match made:
        case (nn.Module() as module, Mapping() as inputs):
            return module, inputs
    raise InputError(
        f"{path}:{name} returns a {type(made).__name__}: return a module with its loss, and a dict "
        "of example inputs"
    )
