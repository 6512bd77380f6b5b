"""Configurations, the model on meta, and the loss around it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from fusion_dask.graph.capture import capture
from fusion_dask.graph.ir import Kind
from fusion_tasks.errors import ModelError
from fusion_tasks.models import CausalLoss, initialise_model, load_config, meta_model

LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=64,
)  # fmt: skip
CONFIGS: list[PretrainedConfig] = [
    load_config(layers=2, width=32, heads=4, context=32, vocab_size=64),
    LLAMA,
    Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=64, tie_word_embeddings=True,
    ),
    MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, vocab_size=64,
    ),
    MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, vocab_size=64,
    ),
]  # fmt: skip
IDS = torch.zeros(2, 12, dtype=torch.long, device="meta")
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_the_loss_is_that_of_the_stock_model(config: PretrainedConfig) -> None:
    model = CausalLoss(meta_model(config))
    graph = capture(model, BATCH)
    ours = initialise_model(model, graph, seed=5)
    stock = AutoModelForCausalLM.from_config(config)
    missing = stock.load_state_dict(ours.state_dict(), strict=False)
    assert missing.missing_keys == missing.unexpected_keys == []
    ids = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    loss = ours.eval()(ids[:, :-1], ids[:, 1:])
    logits = stock.eval()(input_ids=ids[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_names_are_those_of_the_state_dict(config: PretrainedConfig) -> None:
    graph = capture(CausalLoss(meta_model(config)), BATCH)
    names = {n for p in graph.parameters for n in (p.name, *p.aliases)}
    with torch.device("meta"):
        assert names == set(AutoModelForCausalLM.from_config(config).state_dict())
    assert graph.buffers == ()


def test_positions_are_free_and_attention_has_no_mask() -> None:
    for config in CONFIGS[:3]:
        graph = capture(CausalLoss(meta_model(config)), BATCH)
        assert {v.name for v in graph.inputs} == {"input_ids", "labels"}
        made = {v.name: o for o in graph.operators for v in o.outputs if v is not None}
        positions = [o for o in graph.operators if "arange" in o.target]
        assert positions
        assert all(o.kind is Kind.FREE for o in positions)
        attention = [o for o in graph.operators if "attention" in o.target]
        assert len(attention) == 2
        for operator in attention:
            assert operator.args[3:6:2] == (None, True)  # no mask, is_causal
            assert all(made[name].kind is not Kind.FREE for name in operator.inputs)


def test_a_sliding_window_keeps_its_mask() -> None:
    graph = capture(CausalLoss(meta_model(CONFIGS[-1])), BATCH)
    attention = [o for o in graph.operators if "attention" in o.target]
    assert all(o.args[3] is not None for o in attention)


def test_rotary_frequencies_are_those_of_the_real_model() -> None:
    real = dict(AutoModelForCausalLM.from_config(LLAMA).named_buffers())
    made = dict(meta_model(LLAMA).named_buffers())
    assert made.keys() == real.keys() != set()
    assert all(torch.equal(buffer, real[name]) for name, buffer in made.items())
    assert all(p.is_meta for p in meta_model(LLAMA).parameters())


def test_the_configuration_is_not_changed() -> None:
    before = LLAMA.to_dict()
    meta_model(LLAMA, dtype=torch.bfloat16)
    assert LLAMA.to_dict() == before


def test_configurations_from_paths(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        found = load_config(str(path), vocab_size=64)
        assert isinstance(found, LlamaConfig)
        assert found.hidden_size == 32
    gpt = load_config(layers=3, width=48, heads=6, context=40, vocab_size=99, dropout=0.25)
    assert isinstance(gpt, GPT2Config)
    assert (gpt.n_layer, gpt.n_embd, gpt.n_head, gpt.n_positions, gpt.vocab_size) == (
        3, 48, 6, 40, 99,
    )  # fmt: skip
    assert gpt.resid_pdrop == gpt.embd_pdrop == gpt.attn_pdrop == 0.25


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "not a configuration"),
        ("{}", "KeyError"),
        (json.dumps({"model_type": "unheard-of"}), "not a configuration"),
        (json.dumps({"model_type": "vit"}), "no causal language model"),
        (json.dumps({"model_type": "llama", "vocab_size": 10}), "room for 10 tokens"),
    ],
)
def test_unusable_configurations(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(str(path), vocab_size=64)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there_is_not_looked_for_elsewhere() -> None:
    with pytest.raises(ModelError, match="nothing is downloaded"):
        load_config("meta-llama/Llama-2-7b-hf")


@pytest.mark.parametrize(
    "sizes", [{"heads": 3}, {"layers": 0}, {"width": -8}, {"dropout": 1.0}, {"dropout": -0.1}]
)
def test_sizes_that_do_not_fit(sizes: dict[str, int]) -> None:
    with pytest.raises(ModelError):
        load_config("gpt", **sizes)
