"""A 13B model becomes 50 stages without its weights; `tests/bench/graph_scale.py` prints the figures."""

import resource

import torch
from transformers import LlamaConfig

from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate
from fusion_dask.graph.cut import boundary_bytes, valid_positions
from fusion_dask.graph.programs import dumps_program, loads_program
from fusion_dask.planner.plan import make_plan
from fusion_tasks.models import CausalLoss, meta_model

TOKENS, WIDTH, STAGES = 2048, 5120, 50
HIDDEN_BYTES = TOKENS * WIDTH * 2
CONFIG = LlamaConfig(
    hidden_size=WIDTH,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
    vocab_size=32000,
    max_position_embeddings=TOKENS,
)


def test_13b_in_50_stages() -> None:
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    module = CausalLoss(meta_model(CONFIG, dtype=torch.bfloat16))
    graph = annotate(capture(module, {"input_ids": ids, "labels": ids}))
    numbers = sum(p.spec.numel for p in graph.parameters)
    assert 12.9e9 < numbers < 13.1e9

    workers = [f"w{i}" for i in range(STAGES)]
    _, programs = make_plan(graph, workers, stages=STAGES, microbatches=STAGES)
    assert len(programs) == STAGES
    # Finer than a block: 50 stages of 40 blocks, so that some begin inside of one.
    assert sum(p.parameter_bytes for p in programs) == 2 * numbers
    fair = sum(p.flops for p in programs) / STAGES
    assert max(p.flops for p in programs) < 1.9 * fair
    assert all(p.parameters for p in programs)
    for program in programs[:-1]:
        # One hidden state, or two where the cut runs between attention and MLP's input norm.
        assert sum(port.bytes for port in program.sends) <= 2 * HIDDEN_BYTES + TOKENS * 4
    sizes = boundary_bytes(graph)
    assert min(sizes[i - 1] for i in valid_positions(graph)) == HIDDEN_BYTES

    data = [dumps_program(p) for p in programs]
    assert max(map(len, data)) < 10_000
    assert loads_program(data[25]) == programs[25]
    # 13B in bfloat16 are 26 GB: no weight was given memory. ru_maxrss is in KiB on Linux.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20
