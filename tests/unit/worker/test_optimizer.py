"""The recipe: schedule, groups, and a state that comes back bit for bit."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.worker.optimizer import (
    OptimizerConfig,
    build_optimizer,
    learning_rate,
    load_state,
    named_state,
)


@given(st.integers(0, 20), st.integers(1, 100), st.floats(0, 1))
def test_the_schedule_rises_then_falls_between_its_bounds(
    warmup: int, total: int, floor: float
) -> None:
    config = OptimizerConfig(
        learning_rate=2.0, warmup_steps=warmup, total_steps=max(warmup, total), floor=floor
    )
    rates = [learning_rate(config, s) for s in range(config.total_steps + 3)]
    assert all(0 < r <= 2.0 for r in rates) or floor == 0
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(rates[warmup:]))


def _parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(3, 4, generator=generator).requires_grad_(),
        "b": torch.randn(4, generator=generator).requires_grad_(),
        "frozen": torch.randn(2, 2, generator=generator),
    }


def _step(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.1
    optimizer.step()


def test_only_matrices_decay_and_frozen_parameters_have_no_state() -> None:
    parameters = _parameters()
    optimizer = build_optimizer(parameters, OptimizerConfig(weight_decay=0.5))
    decayed = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decayed == {id(parameters["w"]): 0.5, id(parameters["b"]): 0.0}
    _step(optimizer, parameters)
    assert sorted(named_state(optimizer, parameters)) == [
        "b/exp_avg",
        "b/exp_avg_sq",
        "w/exp_avg",
        "w/exp_avg_sq",
    ]


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    config = OptimizerConfig(learning_rate=0.1)
    parameters = _parameters()
    optimizer = build_optimizer(parameters, config)
    _step(optimizer, parameters)
    saved = {n: t.clone() for n, t in named_state(optimizer, parameters).items()}
    twin = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in parameters.items()}
    other = build_optimizer(twin, config)
    load_state(other, twin, saved, 1)

    _step(optimizer, parameters)
    _step(other, twin)

    assert all(torch.equal(twin[n], p) for n, p in parameters.items())


def test_a_stage_without_trainable_parameters_has_an_optimizer_that_does_nothing() -> None:
    frozen = {"w": torch.ones(2, 2)}
    optimizer = build_optimizer(frozen, OptimizerConfig())
    optimizer.step()
    assert named_state(optimizer, frozen) == {}
