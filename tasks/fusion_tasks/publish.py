"""A trained model as a Hugging Face folder that plain `transformers` loads.

Covers the weights (safetensors, sharded above 5 GB, tied weights once), both configurations and the
tokenizer. Does not cover uploading. Invariant: the folder is whole or absent, and a folder that was
there before is never touched: everything is written beside it and moved in by one rename.

The layout is left to `transformers` itself: the tensors become the parameters of a model that was
built without memory, so nothing is copied and the names, the tying and the conversions of that
version are its own.
"""

import copy
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from fusion_tasks.errors import PublishError

__all__ = ["check_output", "publish"]

_SHARD_SIZE = "5GB"


def check_output(directory: Path) -> None:
    """Say before a long run, rather than after it, that a model cannot be published there.

    Raises:
        PublishError: There is something already, or nothing can be written there.
    """
    if os.path.lexists(directory):
        raise _taken(directory)
    ancestor = directory.absolute().parent
    while not os.path.lexists(ancestor):
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise PublishError(f"{ancestor} is not a folder: name another folder for the model")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise PublishError(
            f"no permission to write in {ancestor}: allow it or name another folder for the model"
        )


def publish(
    directory: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    tensors: Mapping[str, torch.Tensor],
) -> Path:
    """Write a model that `AutoModelForCausalLM.from_pretrained(directory)` loads.

    The special tokens of both configurations become those of the tokenizer, so that generation
    ends where a document ends.

    Args:
        directory: The folder to make; its parents are made too.
        config: Configuration of a causal language model.
        tokenizer: The tokenizer that the model was trained with.
        tensors: Its parameters and persistent buffers by their names in the model; of tied
            parameters one name is enough.

    Returns:
        The folder.

    Raises:
        PublishError: The folder exists or cannot be written.
        ValueError: The tensors or the tokenizer do not belong to the configuration.
    """
    check_output(directory)
    model = _model(config, tokenizer, tensors)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # The model goes into a folder inside of the scratch folder: only that one is renamed, and
        # it has the permissions that the person's umask gives, not the 0700 of a scratch folder.
        with tempfile.TemporaryDirectory(
            dir=directory.parent, prefix=f".{directory.name}-"
        ) as scratch:
            made = Path(scratch) / "model"
            with _without_progress_bar():
                model.save_pretrained(made, max_shard_size=_SHARD_SIZE)
            tokenizer.save_pretrained(made)
            _sync(made)
            if os.path.lexists(directory):
                raise _taken(directory)
            made.rename(directory)
            _sync_entry(directory.parent)
    except OSError as error:
        raise PublishError(
            f"cannot write the model to {directory}: {error.strerror or error}; "
            "make room or name another folder"
        ) from error
    return directory


def _model(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    tensors: Mapping[str, torch.Tensor],
) -> PreTrainedModel:
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}"
        )
    end = tokenizer.eos_token_id
    config = copy.deepcopy(config)
    config.eos_token_id = end
    config.bos_token_id = _first(tokenizer.bos_token_id, end)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if model.generation_config is not None:
        # Not in the model's configuration: there it freezes the embedding of that token, which is
        # end-of-text for a tokenizer without a token for padding.
        model.generation_config.pad_token_id = _first(tokenizer.pad_token_id, end)
    model.load_state_dict(_matched(model, tensors), strict=False, assign=True)
    model.tie_weights()
    return model


def _matched(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors under the names that the model loads, complete and of the right shapes."""
    expected = model.state_dict()
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for alias, name in model.all_tied_weights_keys.items():
        tied = named.pop(alias, None)
        if tied is not None and not torch.equal(named.setdefault(name, tied), tied):
            raise ValueError(f"{alias} and {name} are tied but their values differ")
    needed = expected.keys() - model.all_tied_weights_keys.keys()
    for what, names in (("lacks", needed - named.keys()), ("has no", named.keys() - needed)):
        if names:
            raise ValueError(
                f"{type(model).__name__} {what} {len(names)} of the tensors, the first is "
                f"{min(names)}"
            )
    for name, tensor in named.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, the model has {tuple(expected[name].shape)}"
            )
    return named


def _first(*candidates: int | None) -> int | None:
    return next((token for token in candidates if token is not None), None)


def _taken(directory: Path) -> PublishError:
    return PublishError(
        f"{directory} exists and is not overwritten: move it away or name another folder"
    )


def _sync(folder: Path) -> None:
    """Put every file of the folder on the disk, so that the rename cannot overtake the bytes."""
    for path in folder.iterdir():
        _sync_entry(path)
    _sync_entry(folder)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Keep the bar of `transformers` from drawing over ours."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
