"""Language models of `transformers` in the form that the graph can capture.

Covers: configurations (the built-in GPT, or any causal LM from a local folder or JSON file; never a
download), the model without memory on the meta device, and the loss around it. Two things are
changed against the stock model, neither of which changes what it computes: attention says
`is_causal` instead of carrying a mask where no window or padding asks for one, and mixtures of
experts use the batched implementation, which is made of standard operators.

Invariant: the parameter names of `CausalLoss`, and so of its graph, are those of the model's own
state dict.
"""

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fusion_dask.graph.initialise import initialise
from fusion_dask.graph.ir import Graph
from fusion_tasks.errors import ModelError

__all__ = ["CausalLoss", "initialise_model", "load_config", "meta_model", "prepare"]

_CAUSAL_ATTENTION = "fusion_causal_sdpa"


def _no_mask(*_args: object, **_kwargs: object) -> None:
    """Full causal attention needs no mask; the kernel is told `is_causal`."""


AttentionInterface.register(_CAUSAL_ATTENTION, sdpa_attention_forward)
AttentionMaskInterface.register(_CAUSAL_ATTENTION, cast("Any", _no_mask))


def load_config(
    model: str = "gpt",
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 256,
    vocab_size: int = 256,
    dropout: float = 0.0,
) -> PretrainedConfig:
    """The configuration of a causal language model.

    Args:
        model: `gpt` for a GPT-2 style decoder of the given sizes; else the path of a Hugging Face
            folder or of its config.json, whose own sizes hold.
        layers: Number of blocks.
        width: Width of the hidden state.
        heads: Attention heads; divides the width.
        context: Longest sequence, in tokens.
        vocab_size: Size of the tokenizer's vocabulary; a configuration from a path must have room.
        dropout: Probability for embeddings, attention and residuals.

    Raises:
        ModelError: The sizes do not fit together, or the path is not a usable configuration.
    """
    if model != "gpt":
        return _config_from_path(Path(model), vocab_size)
    if min(layers, width, heads, context, vocab_size) < 1 or width % heads:
        raise ModelError(
            f"a model of layers={layers}, width={width}, heads={heads}, context={context}, "
            f"vocab_size={vocab_size} cannot be built: all must be positive and heads divide width"
        )
    if not 0.0 <= dropout < 1.0:
        raise ModelError(f"dropout={dropout} is not a probability below 1: try dropout=0.1")
    return GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=context,
        vocab_size=vocab_size,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )


def _config_from_path(path: Path, vocab_size: int) -> PretrainedConfig:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(
            f"no model configuration at {path}: give 'gpt', a folder with a config.json, or a JSON "
            "file (nothing is downloaded)"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        kind = values.pop("model_type")
        config: PretrainedConfig = AutoConfig.for_model(kind, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file} is not a configuration that this version of transformers knows "
            f"({type(error).__name__}: {str(error)[:200]}): give one with a model_type such as llama"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{file} describes {kind!r}, which is no causal language model: name one")
    if config.get_text_config().vocab_size < vocab_size:
        raise ModelError(
            f"{file} has room for {config.vocab_size} tokens and the tokenizer has {vocab_size}: "
            "raise its vocab_size or take a smaller tokenizer"
        )
    return config


def meta_model(config: PretrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal LM whose parameters take no memory, ready to be captured.

    Buffers outside the state dict (rotary frequencies) are real and as the model's own rules make
    them.

    Args:
        config: Configuration; it is not changed.
        dtype: Dtype of the parameters.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    _make_derived_buffers(model)
    return prepare(model)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Choose the implementations of attention and experts that a graph can hold, in place."""
    if model._supports_sdpa and not _has_window(model.config):
        model.set_attn_implementation(_CAUSAL_ATTENTION)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model


def _has_window(config: PretrainedConfig) -> bool:
    """Whether some layer attends to less than all earlier tokens, so that masks matter."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(text, "sliding_window", None) is not None


def _make_derived_buffers(model: PreTrainedModel) -> None:
    """Give buffers outside the state dict real memory and let the model's rules fill them."""
    for module in model.modules():
        derived = [
            name
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None
        ]
        for name in derived:
            buffer = cast("Tensor", module._buffers[name])
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        if derived:
            model._init_weights(module)


class CausalLoss(nn.Module):
    """A causal LM with its loss: mean cross entropy of the next token.

    The labels are shifted by the data: the logits at position t predict `labels[:, t]`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        # Its children are registered here under their own names, itself is not: parameters are
        # named as in the model's state dict, without a prefix.
        for name, child in model.named_children():
            self.add_module(name, child)
        object.__setattr__(self, "_unregistered", (model,))

    def language_model(self) -> PreTrainedModel:
        """The model without the loss."""
        wrapped: tuple[PreTrainedModel] = self.__dict__["_unregistered"]
        return wrapped[0]

    def _init_weights(self, module: nn.Module) -> None:
        """The model's own rules, found by `initialise.record`."""
        self.language_model()._init_weights(module)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Loss of one microbatch of token ids, both of shape (batch, tokens)."""
        logits_BTV = self.language_model()(input_ids=input_ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), labels.flatten())


def initialise_model(model: nn.Module, graph: Graph, seed: int) -> nn.Module:
    """Give a model on meta the very values that the stages of its graph start from.

    For comparisons with a plain loop. Tied parameters stay tied.

    Args:
        model: The module that was captured, or one with the same parameter names.
        graph: Its graph.
        seed: Seed of the run.

    Returns:
        The same module, on the CPU.
    """
    values = initialise((*graph.parameters, *graph.buffers), seed)
    for parameter in graph.parameters:
        tensor = nn.Parameter(values[parameter.name], requires_grad=parameter.trainable)
        for name in (parameter.name, *parameter.aliases):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, tensor)
    for buffer in graph.buffers:
        owner, _, leaf = buffer.name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, values[buffer.name])
    return model
