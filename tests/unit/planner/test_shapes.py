"""Shapes have the published numbers of parameters, and the FLOPs of the usual formula."""

import pytest
import torch

from fusion_dask.errors import PlanError
from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate
from fusion_dask.planner.model_cost import model_cost
from fusion_dask.planner.shapes import SHAPES, Shape, parameters_of, shape_cost, shape_named
from fusion_tasks.models import CausalLoss, load_config, meta_model

#: As `transformers` counts them: GPT2LMHeadModel, BertForMaskedLM, LlamaForCausalLM.
PUBLISHED = {
    "bert-large": 335_174_458,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-65b": 65_285_660_672,
    "llama3-8b": 8_030_261_248,
}
ROUNDED = {"gpt3-xl": 1.3e9, "gpt3-6.7b": 6.7e9, "gpt3-13b": 13.0e9, "gpt3-175b": 175e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    assert parameters_of(shape_named(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_round_to_the_name_of_the_model(name: str) -> None:
    assert parameters_of(shape_named(name)) == pytest.approx(ROUNDED[name], rel=0.03)


@pytest.mark.parametrize("name", SHAPES)
def test_flops_follow_the_usual_formula(name: str) -> None:
    shape = shape_named(name)
    cost = shape_cost(shape, batch=3, context=shape.context // 2)
    tokens = 3 * (shape.context // 2)
    table = shape.vocabulary * shape.width
    numbers = parameters_of(shape)
    # Without what is only looked up; a tied table is multiplied with in the head.
    numbers -= table if shape.family == "llama" else shape.context * shape.width
    attention = 12 * shape.layers * (shape.context // 2) * shape.width
    assert cost.tokens == tokens
    assert cost.flops == pytest.approx((6 * numbers + attention) * tokens, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sixteen_bytes_a_trained_number(dtype: str) -> None:
    cost = shape_cost(shape_named("gpt2"), dtype=dtype)
    adam = 8
    counted = [(b.parameters, b.parameter_bytes, b.gradient_bytes) for b in cost.blocks]
    counted += [(t.parameters, t.parameter_bytes, t.gradient_bytes) for t in cost.tied]
    for numbers, weights, gradients in counted:
        assert weights + gradients + adam * numbers == 16 * numbers


def test_what_a_microbatch_carries_grows_with_it() -> None:
    one, four = (shape_cost(shape_named("llama3-8b"), batch=b, context=128) for b in (1, 4))
    assert four.flops == 4 * one.flops
    assert four.boundary_bytes[0] == 4 * one.boundary_bytes[0] == 4 * 128 * 4096 * 2
    assert four.blocks[1].saved_bytes == 4 * one.blocks[1].saved_bytes
    assert [b.parameters for b in four.blocks] == [b.parameters for b in one.blocks]
    assert len(one.boundary_bytes) == len(one.blocks) - 1 == 2 * 32 + 1


def test_what_does_not_exist_is_refused_with_what_does() -> None:
    with pytest.raises(PlanError, match="llama-7b"):
        shape_named("llama-8b")
    with pytest.raises(PlanError, match="1 to 512 tokens, not 513"):
        shape_cost(shape_named("bert-large"), context=513)
    with pytest.raises(PlanError, match="float16"):
        shape_cost(shape_named("bert-large"), dtype="int8")


def test_a_shape_counts_as_the_captured_model_does() -> None:
    config = load_config("gpt", layers=2, width=64, heads=4, context=32, vocab_size=100)
    ids_BT = torch.zeros(2, 32, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids_BT, "labels": ids_BT}
    captured = model_cost(annotate(capture(CausalLoss(meta_model(config)), inputs)))
    shape = Shape(
        name="small",
        family="gpt",
        layers=2,
        width=64,
        heads=4,
        kv_heads=4,
        ffn=256,
        vocabulary=100,
        context=32,
    )
    counted = shape_cost(shape, batch=2, dtype="float32")
    assert counted.flops == captured.flops
    assert counted.tokens == captured.tokens
    assert parameters_of(shape) == sum(b.parameters for b in captured.blocks) + 100 * 64
    assert min(counted.boundary_bytes) == min(captured.boundary_bytes)
