"""The protocol that every plane fulfils, and the key that makes its random numbers repeatable.

A plane turns a `StageProgram` plus its tensors into something that computes. It knows nothing of
other stages, of time or of the network. What it keeps between a forward and its backward, it keeps
per microbatch.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fusion_dask.graph.ir import StageProgram

__all__ = ["Forward", "Plane", "RandomKey"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKey:
    """What a random number depends on, besides the operator that draws it.

    >>> key = RandomKey(seed=1, step=2, microbatch=3)
    >>> key.derive("dropout") == key.derive("dropout"), key.derive("dropout") == key.derive("noise")
    (True, False)
    """

    seed: int
    step: int
    microbatch: int

    def derive(self, operator: str) -> int:
        """A 63-bit seed for one operator of this microbatch."""
        text = f"{self.seed}/{self.step}/{self.microbatch}/{operator}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one forward gives: boundary tensors by value name, results by role, both detached."""

    sends: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]


class Plane(Protocol):
    """One stage on one device. Tensors cross this interface on the plane's own device."""

    program: StageProgram
    device: torch.device

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters held, by name; trainable ones require a gradient."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers held, by name, as the last forward left them."""

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: Mapping[str, torch.Tensor],
        key: RandomKey,
        *,
        keep: bool,
    ) -> Forward:
        """Compute one microbatch; with `keep`, remember what its backward needs."""

    def backward(
        self, microbatch: int, gradients: Mapping[str, torch.Tensor], loss_gradient: float
    ) -> Mapping[str, torch.Tensor]:
        """Accumulate the gradients of one kept microbatch; return those of what was received."""
