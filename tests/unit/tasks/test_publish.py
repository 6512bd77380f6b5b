import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from fusion_tasks import publish as publish_module
from fusion_tasks.errors import PublishError
from fusion_tasks.publish import check_output, publish
from fusion_tasks.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(None)
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    # Its experts are one tensor in memory and many in the file.
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}


@pytest.fixture(autouse=True)
def _same_progress_bar() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    yield
    assert hf_logging.is_progress_bar_enabled() == shown


def built(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.train(False)
    return model


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def names_in(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", "pt") as stored:
        assert stored.metadata() == {"format": "pt"}
        return set(stored.keys())


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_loads_with_equal_logits(tmp_path: Path, name: str) -> None:
    model = built(CONFIGS[name])
    directory = publish(tmp_path / "made" / name, CONFIGS[name], TOKENIZER, tensors_of(model))
    assert entries(directory) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert entries(directory.parent) == [name]
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)("def f(x):")["input_ids"]])
    assert ids.tolist() == [list(b"def f(x):")]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_tied_weights_are_stored_once_whichever_name_they_come_by(tmp_path: Path) -> None:
    config = CONFIGS["gpt2"]
    one_name = tensors_of(built(config))
    embedding = one_name["transformer.wte.weight"]
    both = one_name | {"lm_head.weight": embedding.clone()}
    other = {n: t for n, t in both.items() if n != "transformer.wte.weight"}
    for label, tensors in (("one", one_name), ("both", both), ("other", other)):
        directory = publish(tmp_path / label, config, TOKENIZER, tensors)
        assert names_in(directory) == set(one_name)
        stored = AutoModelForCausalLM.from_pretrained(directory)
        head = stored.get_output_embeddings()
        assert torch.equal(head.weight, embedding)
        assert head.weight is stored.get_input_embeddings().weight
    with pytest.raises(ValueError, match="tied but their values differ"):
        publish(
            tmp_path / "x",
            config,
            TOKENIZER,
            both | {"lm_head.weight": torch.zeros_like(embedding)},
        )


def test_untied_weights_are_stored_twice(tmp_path: Path) -> None:
    directory = publish(
        tmp_path / "m", CONFIGS["llama"], TOKENIZER, tensors_of(built(CONFIGS["llama"]))
    )
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names_in(directory)


def test_generation_ends_where_the_tokenizer_says(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    directory = publish(tmp_path / "m", config, TOKENIZER, tensors_of(built(config)))
    generation = json.loads((directory / "generation_config.json").read_text())
    model = json.loads((directory / "config.json").read_text())
    for stored in (generation, model):
        assert (stored["eos_token_id"], stored["bos_token_id"]) == (256, 256)
    assert generation["pad_token_id"] == 256
    assert model.get("pad_token_id") is None
    assert model["dtype"] == "float32"
    assert config.eos_token_id == 2, "the caller's configuration was changed"


def test_the_precision_of_the_tensors_is_kept(tmp_path: Path) -> None:
    tensors = {n: t.bfloat16() for n, t in tensors_of(built(CONFIGS["llama"])).items()}
    directory = publish(tmp_path / "m", CONFIGS["llama"], TOKENIZER, tensors)
    assert AutoModelForCausalLM.from_pretrained(directory).dtype == torch.bfloat16


def test_a_large_model_is_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_module, "_SHARD_SIZE", "50KB")
    model = built(CONFIGS["llama"])
    directory = publish(tmp_path / "m", CONFIGS["llama"], TOKENIZER, tensors_of(model))
    assert "model.safetensors.index.json" in entries(directory)
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
    ids = torch.arange(8)[None]
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_tensors_that_do_not_belong_to_the_model_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["gpt2"]
    tensors = tensors_of(built(config))
    norm = "transformer.ln_f.weight"
    wrong: dict[str, dict[str, torch.Tensor]] = {
        f"lacks 1 of the tensors, the first is {norm}": {
            n: t for n, t in tensors.items() if n != norm
        },
        "has no 1 of the tensors, the first is extra": tensors | {"extra": torch.zeros(1)},
        rf"{norm} is \(3,\), the model has \(32,\)": tensors | {norm: torch.zeros(3)},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            publish(tmp_path / "m", config, TOKENIZER, given)
    small = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match="257 tokens, the model only 256"):
        publish(tmp_path / "m", small, TOKENIZER, tensors)
    assert entries(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_is_there_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "model"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nothing")
    with pytest.raises(PublishError, match="exists and is not overwritten"):
        check_output(target)
    with pytest.raises(PublishError, match="exists and is not overwritten"):
        publish(target, CONFIGS["gpt2"], TOKENIZER, {})
    assert entries(tmp_path) == ["model"]


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="file is not a folder"):
        check_output(tmp_path / "file" / "a" / "model")


def test_a_place_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_output(tmp_path / "a" / "b" / "model")
    asked: list[Path] = []

    def deny(path: Path, mode: int) -> bool:
        asked.append(path)
        return mode & os.W_OK == 0

    # The permission bits do not stop a superuser, who may run this.
    monkeypatch.setattr(os, "access", deny)
    with pytest.raises(PublishError, match="no permission to write"):
        check_output(tmp_path / "a" / "b" / "model")
    assert asked == [tmp_path]


def test_checking_a_relative_place_looks_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_output(Path("model"))
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), PublishError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_half_way_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    seen: type[BaseException],
) -> None:
    found: list[str] = []

    def fail(folder: Path) -> None:
        found.extend(entries(folder))
        raise fault

    monkeypatch.setattr(publish_module, "_sync", fail)
    tensors = tensors_of(built(CONFIGS["gpt2"]))
    with pytest.raises(seen) as caught:
        publish(tmp_path / "model", CONFIGS["gpt2"], TOKENIZER, tensors)
    assert "model.safetensors" in found, "the fault did not fire where it should"
    assert entries(tmp_path) == []
    if seen is PublishError:
        assert "No space left on device; make room" in str(caught.value)


def test_a_folder_that_appears_meanwhile_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(_: Path) -> None:
        (tmp_path / "model").mkdir()

    monkeypatch.setattr(publish_module, "_sync", appear)
    tensors = tensors_of(built(CONFIGS["gpt2"]))
    with pytest.raises(PublishError, match="exists and is not overwritten"):
        publish(tmp_path / "model", CONFIGS["gpt2"], TOKENIZER, tensors)
    assert entries(tmp_path) == ["model"]
    assert entries(tmp_path / "model") == []


def test_the_folder_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tensors = tensors_of(built(CONFIGS["gpt2"]))
    directory = publish(tmp_path / "model", CONFIGS["gpt2"], TOKENIZER, tensors)
    assert directory.stat().st_mode == (tmp_path / "other").stat().st_mode
