"""The tiny decoder that the engine's tests train."""

import functools

import torch

from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate
from fusion_dask.graph.ir import Graph
from fusion_tasks.models import CausalLoss, load_config, meta_model

__all__ = ["BATCH", "CONTEXT", "MICROBATCHES", "VOCABULARY", "tiny_gpt", "tiny_graph"]

BATCH, CONTEXT, VOCABULARY, MICROBATCHES = 2, 16, 61, 4


def tiny_gpt(dropout: float = 0.0) -> CausalLoss:
    """Three blocks of width 32, tied embeddings, on meta."""
    config = load_config(
        "gpt", layers=3, width=32, heads=2, context=CONTEXT, vocab_size=VOCABULARY, dropout=dropout
    )
    return CausalLoss(meta_model(config))


@functools.cache
def tiny_graph(dropout: float = 0.0) -> Graph:
    """Its training graph, with costs."""
    ids = torch.zeros(BATCH, CONTEXT, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids.clone()}
    return annotate(capture(tiny_gpt(dropout), inputs))
