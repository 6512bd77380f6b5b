"""Pays torch's first-use costs before a stage arrives."""

import torch

__all__ = ["warm_up"]


def warm_up() -> None:
    """Run one tiny forward, backward and AdamW update on the CPU."""
    weight = torch.zeros(2, 2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    (weight @ weight).sum().backward()
    optimizer.step()
