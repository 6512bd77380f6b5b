"""Initial values by name: the distributions of the real init, whatever the order or partition."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from fusion_dask.errors import CaptureError
from fusion_dask.graph.initialise import initialisable, initialise, record
from fusion_dask.graph.ir import Buffer, InitStep, Parameter, TensorSpec
from fusion_tasks.models import CausalLoss, meta_model
from support.zoo import ZOO

_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def parameters_of(module: nn.Module) -> list[Parameter]:
    steps = record(module)
    return [
        Parameter(
            name=name,
            spec=TensorSpec(shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch.")),
            init=steps.get(name, ()),
        )
        for name, p in module.named_parameters()
    ]


def assert_same_distribution(made: torch.Tensor, real: torch.Tensor, name: str) -> None:
    count = real.numel()
    if count < 8:  # too few to say anything
        return
    spread = max(real.std().item() if count > 1 else 0.0, 1e-12)
    assert made.shape == real.shape
    if spread == 1e-12:
        assert torch.equal(made, real), name
        return
    assert abs(made.mean() - real.mean()) < 6 * spread / math.sqrt(count), name
    assert abs(made.std() / spread - 1) < 6 / math.sqrt(count), name
    kurtosis = [((t - t.mean()) / t.std()).pow(4).mean().item() for t in (made, real)]
    if count > 500:
        tolerance = 5 * math.sqrt(2 * 24 / count)
        assert abs(kurtosis[0] - kurtosis[1]) < tolerance, name  # uniform 1.8, normal 3


@pytest.mark.parametrize("name", sorted(set(ZOO) - {"mistral-window", "llama-tied"}))
def test_means_and_deviations_are_those_of_the_real_init(name: str) -> None:
    module, _ = ZOO[name].make()
    made = initialise(parameters_of(module), seed=3)
    for key, real in module.named_parameters():
        assert_same_distribution(made[key], real.detach(), key)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, bos_token_id=0, eos_token_id=0),
        LlamaConfig(**_SIZES, num_attention_heads=2, vocab_size=256),
        Qwen3Config(**_SIZES, num_attention_heads=2, vocab_size=256, pad_token_id=3),
    ],
    ids=["gpt2", "llama", "qwen3-padding"],
)
def test_a_model_on_meta_has_the_rules_of_the_real_one(config: PretrainedConfig) -> None:
    on_meta = CausalLoss(meta_model(config))
    made = initialise(parameters_of(on_meta), seed=3)
    torch.manual_seed(0)
    real = AutoModelForCausalLM.from_config(config)
    for key, value in real.named_parameters():
        assert_same_distribution(made[key], value.detach(), key)
    if config.pad_token_id is not None:
        assert not made["model.embed_tokens.weight"][config.pad_token_id].any()
    assert parameters_of(on_meta) == parameters_of(CausalLoss(real))


def test_values_depend_on_seed_and_name_only() -> None:
    module, _ = ZOO["gpt2"].make()
    parameters = parameters_of(module)
    whole = initialise(parameters, seed=1)
    torch.manual_seed(123)
    for part in (parameters[::-1], parameters[3:7]):
        assert all(torch.equal(t, whole[n]) for n, t in initialise(part, seed=1).items())
    other = initialise(parameters, seed=2)
    drawn = [p.name for p in parameters if p.init[-1].op != "fill_"]
    assert drawn
    assert not any(torch.equal(other[name], whole[name]) for name in drawn)
    assert not torch.equal(whole[drawn[2]].flatten()[:50], whole[drawn[3]].flatten()[:50])


def test_recording_changes_nothing() -> None:
    module, _ = ZOO["resnet"].make()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    state = torch.get_rng_state()
    record(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.table = nn.Parameter(torch.randn(4, 3))
        self.cut = nn.Parameter(torch.empty(50, 60))
        self.turn = nn.Parameter(torch.empty(6, 6))
        self.same = nn.Parameter(torch.empty(4, 4))
        self.norm = nn.BatchNorm1d(3)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.cut, std=0.1, a=-0.15, b=0.15)
        nn.init.orthogonal_(self.turn)
        nn.init.eye_(self.same)


def test_what_has_no_rule_is_an_error_with_a_way_out() -> None:
    module = Own()
    made = {p.name: p for p in parameters_of(module)}
    assert made["scale"].init == (InitStep(op="fill_", args=(0.5,)),)
    assert not initialisable(made["table"])
    with pytest.raises(CaptureError, match=r"table: give the module a reset_parameters method"):
        initialise(made.values(), seed=0)
    cut = initialise([made["cut"]], seed=0)["cut"]
    assert cut.abs().max() <= 0.15
    assert 0.06 < cut.std() < 0.1
    turn = initialise([made["turn"]], seed=0)["turn"]
    torch.testing.assert_close(turn @ turn.t(), torch.eye(6))
    assert torch.equal(initialise([made["same"]], seed=0)["same"], torch.eye(4))
    with torch.device("meta"):
        assert parameters_of(Own())[2:5] == [made["cut"], made["turn"], made["same"]]


def test_buffers_are_initialised_too() -> None:
    steps = record(nn.BatchNorm1d(3))
    specs = {"running_var": "float32", "num_batches_tracked": "int64"}
    buffers = [
        Buffer(
            name=name,
            spec=TensorSpec(shape=(3,) if name == "running_var" else (), dtype=dtype),
            init=steps[name],
        )
        for name, dtype in specs.items()
    ]
    made = initialise(buffers, seed=0)
    assert made["running_var"].tolist() == [1, 1, 1]
    assert made["num_batches_tracked"].dtype == torch.int64
    table = torch.arange(6.0).reshape(2, 3)
    fixed = Buffer(
        name="t", spec=TensorSpec(shape=(2, 3), dtype="float32"), data=table.numpy().tobytes()
    )
    assert torch.equal(initialise([fixed], seed=0)["t"], table)


def test_an_unknown_step_is_not_executed() -> None:
    spec = TensorSpec(shape=(2,), dtype="float32")
    steps = (InitStep(op="fill_", args=(0.0,)), InitStep(op="resize_", args=(9.0,)))
    with pytest.raises(CaptureError, match="not an initialisation"):
        initialise([Parameter(name="w", spec=spec, init=steps)], seed=0)
