"""How long a 13B model takes from configuration to 50 annotated stage programs, and how much memory.

    python tests/bench/graph_scale.py [--layers 40] [--stages 50]

Prints seconds of each part, the resident memory at its highest, and the stages' extremes. The aim is
below 30 s and 1.5 GB on a laptop's CPU.
"""

import argparse
import resource
import time

import torch
from transformers import LlamaConfig

from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate, stage_memory
from fusion_dask.graph.cut import boundary_bytes, cut, valid_positions
from fusion_dask.graph.programs import dumps_program, loads_program
from fusion_dask.planner.partition import candidates, operator_seconds, partition
from fusion_tasks.models import CausalLoss, meta_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--stages", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=options.layers,
        num_attention_heads=40,
        vocab_size=32000,
        max_position_embeddings=options.tokens,
    )
    marks = [("start", time.perf_counter())]

    def mark(what: str) -> None:
        marks.append((what, time.perf_counter()))
        print(f"{what:28} {marks[-1][1] - marks[-2][1]:7.2f} s")

    module = CausalLoss(meta_model(config, dtype=torch.bfloat16))
    mark("model on meta")
    ids = torch.zeros(1, options.tokens, dtype=torch.long, device="meta")
    graph = capture(module, {"input_ids": ids, "labels": ids})
    mark("capture")
    graph = annotate(graph)
    mark("annotate")
    sizes = boundary_bytes(graph)
    useful = candidates(graph, sizes, valid_positions(graph))
    positions = partition(operator_seconds(graph), useful, sizes, [1.0] * options.stages)
    mark("plan")
    programs = cut(graph, positions)
    mark("cut")
    data = [dumps_program(p) for p in programs]
    mark("serialise")
    assert loads_program(data[0]) == programs[0]
    mark("read and check one stage")
    memory = [
        stage_memory(p, microbatches_in_flight=1, optimizer_bytes_per_parameter=8) for p in programs
    ]
    mark("memory of every stage")
    parameters = sum(p.spec.numel for p in graph.parameters)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{'total':28} {marks[-1][1] - marks[0][1]:7.2f} s")
    print(f"resident at its highest      {resident:7.2f} GB")
    print(f"{parameters / 1e9:.2f}B parameters, {len(graph.operators)} operators")
    print(
        f"boundary bytes {min(p.sends[0].bytes for p in programs[:-1]) / 1e6:.1f} to "
        f"{max(sum(q.bytes for q in p.sends) for p in programs) / 1e6:.1f} MB, "
        f"programs up to {max(map(len, data)) / 1e3:.1f} kB"
    )
    print(
        f"stage memory {min(m.total for m in memory) / 1e9:.2f} to "
        f"{max(m.total for m in memory) / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
