"""Random tokens for measurements: what is learnt from them is not the subject."""

from collections.abc import Mapping, Sequence

import torch

__all__ = ["Tokens"]


class Tokens:
    """Seeded windows of a batch, as (B, T) int64.

    Args:
        vocabulary: Different tokens.
        batch: Windows in a microbatch (B).
        context: Tokens in a window (T).
    """

    def __init__(self, *, vocabulary: int, batch: int, context: int) -> None:
        self._vocabulary = vocabulary
        self._shape = (batch, context + 1)

    def microbatch(
        self, step: int, microbatch: int, names: Sequence[str]
    ) -> Mapping[str, torch.Tensor]:
        """The inputs of one microbatch."""
        generator = torch.Generator().manual_seed(step * 1000 + microbatch)
        rows = torch.randint(self._vocabulary, self._shape, generator=generator)
        columns = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
        return {name: columns[name].contiguous() for name in names}
