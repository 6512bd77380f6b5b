"""Token windows: what a stage reads for one microbatch of a causal language model.

The position in the data is a function of the step, so there is no reader state to checkpoint: epoch
after epoch the windows of the corpus are permuted by a seed, and step s takes the next global batch.
Any stage can compute any microbatch's inputs; the tokens come from the store, never from another
stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fusion_storage.tokens import TokenArray

__all__ = ["TokenWindows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWindows:
    """Windows of `context` tokens out of `tokens[start:stop]`, and the tokens that follow them.

    Attributes:
        tokens: The corpus.
        start: First token of the part that is used.
        stop: One past its last token.
        context: Tokens in a window (T).
        batch: Windows in a microbatch (B).
        microbatches: Microbatches in a global batch.
        seed: Seeds the order of the windows; None keeps their order in the corpus.
    """

    tokens: TokenArray
    start: int
    stop: int
    context: int
    batch: int
    microbatches: int
    seed: int | None

    @property
    def windows(self) -> int:
        """Windows that do not overlap; each needs one token after its last."""
        return (self.stop - self.start - 1) // self.context

    def microbatch(
        self, step: int, microbatch: int, names: Sequence[str]
    ) -> Mapping[str, torch.Tensor]:
        """`input_ids` and `labels`, both int64 of shape (B, T); labels[t] follows input_ids[t]."""
        first = (step * self.microbatches + microbatch) * self.batch
        rows = np.stack([self._window(first + i) for i in range(self.batch)]).astype(np.int64)
        columns = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
        return {name: torch.from_numpy(np.ascontiguousarray(columns[name])) for name in names}

    def _window(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.windows)
        if self.seed is not None:
            place = int(_permutation(self.seed, epoch, self.windows)[place])
        return self.tokens.read(self.start + place * self.context, self.context + 1)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)
