"""The Prefect tasks that capture a language model and cut it into stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from transformers import PretrainedConfig

from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate
from fusion_dask.graph.cut import cut_like, holders
from fusion_dask.graph.ir import Graph
from fusion_dask.graph.programs import dumps_program
from fusion_dask.pipeline.driver import Programs
from fusion_dask.pipeline.spec import ownership
from fusion_dask.planner.plan import Plan, make_plan
from fusion_dask.planner.profile import Profile
from fusion_tasks.models import CausalLoss, meta_model

__all__ = ["Captured", "Planned", "capture_model", "plan_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One model as two graphs: in training, and in evaluation, where dropout is off."""

    training: Graph
    evaluation: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, the serialised programs of its stages, and who owns which parameter.

    Attributes:
        plan: The plan.
        programs: What each stage runs.
        order: Trainable parameters in the model's order.
        owned: Per stage, the trainable parameters that it owns.
        parameters: Names of all parameters, tied ones once.
    """

    plan: Plan
    programs: Programs
    order: tuple[str, ...]
    owned: tuple[tuple[str, ...], ...]
    parameters: tuple[str, ...]


@task(cache_policy=NO_CACHE)
def capture_model(config: PretrainedConfig, *, batch: int, context: int) -> Captured:
    """Capture a causal language model and its loss, without giving it memory.

    Args:
        config: The model's configuration.
        batch: Windows in a microbatch (B).
        context: Tokens in a window (T).

    Raises:
        CaptureError: The model cannot be captured; names the line of the model.
    """
    model = CausalLoss(meta_model(config))
    ids_BT = torch.zeros(batch, context, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids_BT, "labels": ids_BT.clone()}
    return Captured(
        training=annotate(capture(model, inputs, training=True)),
        evaluation=capture(model, inputs, training=False),
    )


@task(cache_policy=NO_CACHE)
def plan_stages(
    captured: Captured,
    workers: Sequence[str],
    *,
    stages: int | None,
    microbatches: int,
    positions: Sequence[int] | None = None,
    profiles: Mapping[str, Profile] | None = None,
    dtype: str | None = None,
) -> Planned:
    """Cut a captured model over workers; arguments and errors are those of `make_plan`."""
    plan, training = make_plan(
        captured.training,
        workers,
        stages=stages,
        microbatches=microbatches,
        positions=positions,
        profiles=profiles,
        dtype=dtype,
    )
    evaluation = cut_like(captured.evaluation, holders(training))
    order = tuple(p.name for p in captured.training.parameters if p.trainable)
    return Planned(
        plan=plan,
        programs=Programs(
            training=tuple(map(dumps_program, training)),
            evaluation=tuple(map(dumps_program, evaluation)),
        ),
        order=order,
        owned=ownership(training, order),
        parameters=tuple(p.name for p in captured.training.parameters),
    )
