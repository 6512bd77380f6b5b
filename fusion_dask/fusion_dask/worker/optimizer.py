"""AdamW with warm-up and cosine decay, as a pure recipe that every stage applies to its own part.

The recipe depends on the step and on nothing that was observed, so stages never have to agree on a
learning rate. Weight decay touches matrices only (at least two axes), as is usual for decoders
(Loshchilov & Hutter, arXiv 1711.05101; Brown et al., arXiv 2005.14165, appendix B).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = [
    "OptimizerConfig",
    "build_optimizer",
    "learning_rate",
    "load_state",
    "named_state",
]

_SLOTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The recipe.

    Attributes:
        learning_rate: Peak of the schedule.
        warmup_steps: Steps of linear warm-up from 1 / warmup_steps of the peak.
        total_steps: The step at which the cosine reaches its floor.
        floor: Final learning rate as a fraction of the peak.
        weight_decay: Decoupled decay of matrices.
        betas: AdamW's decay rates.
        eps: AdamW's epsilon.
        clip_norm: Largest global gradient norm, or None.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 0
    total_steps: int = 1
    floor: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float | None = 1.0


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of the update that ends step `step` (from 0).

    >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, total_steps=10, floor=0.1)
    >>> [round(learning_rate(config, s), 3) for s in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.134]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.floor + (1.0 - config.floor) * cosine)


def build_optimizer(
    parameters: Mapping[str, torch.Tensor], config: OptimizerConfig
) -> torch.optim.AdamW:
    """An AdamW over the trainable ones of `parameters`; its update is element by element."""
    trainable = [p for p in parameters.values() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if p.dim() >= 2],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in {"cpu", "cuda", "mps"} for p in trainable)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]] or [{"params": [torch.zeros(0, requires_grad=True)]}],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def named_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors as `name/slot`; empty before the first update.

    AdamW counts the updates of each parameter in a tensor of its own. All of them count the updates
    of the stage, so they are not stored: thousands of tiny arrays cost more than the weights.
    """
    return {
        f"{name}/{slot}": optimizer.state[parameter][slot]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for slot in _SLOTS
    }


def load_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    updates: int,
) -> None:
    """Put tensors named by `named_state` back, as of a number of updates."""
    for name, parameter in parameters.items():
        if f"{name}/{_SLOTS[0]}" in tensors:
            state = {slot: tensors[f"{name}/{slot}"] for slot in _SLOTS}
            state["step"] = torch.tensor(float(updates))
            optimizer.state[parameter] = {
                slot: t.to(parameter.device, copy=True) for slot, t in state.items()
            }
