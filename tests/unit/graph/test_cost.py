"""FLOPs and memory that are predicted, against torch's counter and the allocator."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate, stage_memory
from fusion_dask.graph.cut import cut, valid_positions
from fusion_dask.graph.initialise import initialise
from fusion_dask.graph.ir import Graph, Kind, StageProgram
from fusion_dask.planes.base import RandomKey
from fusion_dask.planes.torch_plane import TorchPlane
from fusion_tasks.models import CausalLoss, load_config, meta_model
from support.zoo import ZOO


def totals(graph: Graph) -> tuple[int, int]:
    costs = [o.cost for o in graph.operators]
    return sum(c.flops_forward for c in costs), sum(c.flops_backward for c in costs)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "resnet", "unet", "gnn", "vae"])
def test_flops_agree_with_the_counter_of_torch(name: str) -> None:
    module, batch = ZOO[name].make()
    forward, backward = totals(annotate(capture(module, batch)))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            result: Any = module(**batch)
        loss = result if isinstance(result, torch.Tensor) else result["loss"]
        assert forward == counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
    assert backward == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_flops_of_a_decoder_are_6nd_plus_attention(kind: str) -> None:
    layers, width, length, batch, vocabulary = 4, 256, 128, 2, 1000
    if kind == "gpt":
        config: Any = load_config(
            layers=layers, width=width, heads=4, context=length, vocab_size=vocabulary
        )
    else:
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_attention_heads=4,
            vocab_size=vocabulary,
        )
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    graph = annotate(capture(CausalLoss(meta_model(config)), {"input_ids": ids, "labels": ids}))
    used = {name for o in graph.operators if o.cost.flops_forward for name in o.inputs}
    weights = sum(p.spec.numel for p in graph.parameters if p.name in used)
    tokens = batch * length
    expected = 6 * weights * tokens + 12 * layers * length * width * tokens
    assert sum(totals(graph)) == pytest.approx(expected, rel=0.02)


def test_free_operators_cost_nothing_and_frozen_layers_less() -> None:
    module, batch = ZOO["vae"].make()
    graph = annotate(capture(module, batch))
    frozen = next(o for o in graph.operators if "frozen.weight" in o.inputs)
    first = next(o for o in graph.operators if "encode.weight" in o.inputs)
    second = next(o for o in graph.operators if "mean.weight" in o.inputs)
    assert frozen.cost.flops_backward == frozen.cost.flops_forward  # of its input only
    assert first.cost.flops_backward == first.cost.flops_forward  # of its weight only
    assert second.cost.flops_backward == 2 * second.cost.flops_forward
    assert all(o.cost.flops_forward == 0 for o in graph.operators if o.kind is Kind.FREE)


def measured_peak(program: StageProgram, state: dict[str, torch.Tensor], in_flight: int) -> int:
    """Most bytes that torch's allocator had out during two training steps."""
    inputs = {v.name: torch.zeros(v.spec.shape, dtype=torch.long) for v in program.inputs}
    received = {v.name: torch.randn(v.spec.shape) for port in program.receives for v in port.values}
    seeds = {
        v.name: torch.ones(v.spec.shape) for port in program.sends for v in port.values if v.grad
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        plane = TorchPlane(
            program,
            {p.name: state[p.name].clone() for p in program.parameters},
            {},
            device=torch.device("cpu"),
        )
        optimizer = torch.optim.AdamW(list(plane.parameters().values()))
        for _ in range(2):
            for microbatch in range(in_flight):
                arrived = {name: t.clone() for name, t in received.items()}
                key = RandomKey(seed=0, step=0, microbatch=microbatch)
                plane.forward(inputs, arrived, key, keep=True)
            for microbatch in range(in_flight):
                plane.backward(microbatch, seeds, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    peak = now = 0
    for _, size in sorted(events):
        now += size
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_peak_memory_of_stages(dropout: float, in_flight: int) -> None:
    config = load_config(layers=3, width=128, heads=4, context=128, vocab_size=500, dropout=dropout)
    ids = torch.zeros(2, 128, dtype=torch.long, device="meta")
    graph = capture(CausalLoss(meta_model(config)), {"input_ids": ids, "labels": ids})
    state = initialise(graph.parameters, seed=0)
    places = valid_positions(graph)
    for program in cut(graph, [places[len(places) // 3], places[2 * len(places) // 3]]):
        predicted = stage_memory(
            program, microbatches_in_flight=in_flight, optimizer_bytes_per_parameter=8
        )
        peak = measured_peak(program, state, in_flight)
        assert predicted.total == pytest.approx(peak, rel=0.15), program.index
        assert predicted.parameters == program.parameter_bytes
        assert predicted.optimizer == 2 * predicted.gradients == 2 * predicted.parameters


def test_saved_bytes_are_paid_once() -> None:
    module, batch = ZOO["gpt2"].make()
    graph = annotate(capture(module, batch))
    (whole,) = cut(graph, [])
    memory = stage_memory(whole, microbatches_in_flight=1, optimizer_bytes_per_parameter=8)
    assert sum(o.cost.saved_bytes for o in graph.operators) == memory.saved
    three = stage_memory(whole, microbatches_in_flight=3, optimizer_bytes_per_parameter=8)
    assert three.saved == 3 * memory.saved
    naive = sum(v.spec.bytes for o in graph.operators for v in o.outputs if v is not None)
    assert memory.saved < naive
