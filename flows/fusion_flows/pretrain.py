"""The built-in procedure `pretrain`: a language model from text, trained in a pipeline.

    corpus -> tokenizer -> capture -> plan -> train in segments -> evaluate -> publish

A run is the function `pretrain` of one validated `PretrainConfig`. All that it makes is kept in the
store under the run's name; `resume` goes on from there, with the configuration of the run.
"""

import datetime
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed import Client
from prefect import flow
from rich.console import Console
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from fusion_dask.errors import ClusterError, FusionError
from fusion_dask.pipeline.data import TokenWindows
from fusion_dask.pipeline.pool import profiles_of, workers_of
from fusion_dask.pipeline.spec import RunSpec
from fusion_dask.planner.plan import Plan
from fusion_dask.planner.profile import Profile
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_flows.pretrain_config import RESUMING, PretrainConfig
from fusion_storage.checkpoint import latest
from fusion_storage.runs import create_run, read_run
from fusion_storage.store import Store, open_store
from fusion_storage.tokens import TokenArray
from fusion_tasks.errors import ModelError
from fusion_tasks.graphs import Captured, Planned, capture_model, plan_stages
from fusion_tasks.models import load_config
from fusion_tasks.outcome import publish_model, report_run
from fusion_tasks.progress import progress
from fusion_tasks.publish import check_output
from fusion_tasks.records import TrainingHistory
from fusion_tasks.settings import Settings, current
from fusion_tasks.text import PreparedText, prepare_text
from fusion_tasks.tokenizer import load_tokenizer
from fusion_tasks.train import Trained, TrainRequest, past_steps, train

__all__ = ["PretrainConfig", "PretrainResult", "pretrain"]


_DEFAULT = PretrainConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainResult:
    """What a run came to. Losses in nats per token."""

    run: str
    model: Path
    steps: int
    train_loss: float
    validation_loss: float
    unigram_entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """All that training needs, before the first step."""

    run: str
    config: PretrainConfig
    text: PreparedText
    model: PretrainedConfig
    tokenizer: PreTrainedTokenizerFast
    planned: Planned
    output: Path


@flow(name="pretrain")
def pretrain(config: PretrainConfig = _DEFAULT, resume: str | None = None) -> PretrainResult:
    """Train a causal language model from text.

    Args:
        config: The run.
        resume: Go on with this run instead, under its own configuration.
    """
    begin = time.monotonic()
    console = Console(file=sys.stdout)
    settings = current()
    store = open_store(settings.store)
    store.check_writable()
    if resume is None:
        prepared = _prepare(config, store, settings, console)
    else:
        prepared = _recall(resume, store, settings)
    try:
        trained = _train(prepared, store, settings, console)
    except BaseException:
        _say_how_to_resume(prepared.run, store, console)
        raise
    return _finish(prepared, trained, store, console, begin)


def _prepare(
    config: PretrainConfig, store: Store, settings: Settings, console: Console
) -> _Prepared:
    """Check what can be checked, then text, graph and plan; the run exists when this returns."""
    run = config.name or _new_name()
    output = config.output or Path("fusion-runs") / run
    check_output(output)
    tokenizer = load_tokenizer(config.tokenizer)
    model = load_config(
        config.model,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        context=config.context,
        vocab_size=len(tokenizer),
        dropout=config.dropout,
    )
    _check_context(config, model)
    workers, profiles = _pool(settings, config.stages)
    text = prepare_text(
        store,
        data=config.data,
        tokenizer=config.tokenizer,
        seed=config.seed,
        validation_fraction=config.validation_fraction,
        context=config.context,
        batch=config.batch,
    )
    captured = _capture(config, model)
    planned = plan_stages(
        captured,
        workers,
        stages=config.stages,
        microbatches=config.microbatches,
        profiles=profiles,
        dtype=_autocast(config),
    )
    create_run(
        store,
        run,
        {
            "procedure": "pretrain",
            "config": config.model_dump(mode="json"),
            "output": str(output.absolute()),
            "text": asdict(text),
            "model": model.to_dict(),
            "plan": planned.plan.to_json(),
        },
    )
    console.print(
        f"run [bold]{run}[/]: {text.title}, {text.tokens:,} tokens; "
        f"{sum(p.spec.numel for p in captured.training.parameters):,} parameters in "
        f"{len(planned.plan.stages)} stages",
        highlight=False,
    )
    return _Prepared(
        run=run,
        config=config,
        text=text,
        model=model,
        tokenizer=tokenizer,
        planned=planned,
        output=output,
    )


def _recall(run: str, store: Store, settings: Settings) -> _Prepared:
    """A run as it was recorded; the same partition where there are workers for it."""
    record = read_run(store, run)
    if record.get("procedure") != "pretrain":
        raise FusionError(f"run {run} is not a run of pretrain; it is {record.get('procedure')!r}")
    config = PretrainConfig.model_validate(record["config"], context=RESUMING)
    output = Path(record["output"])
    check_output(output)
    values = dict(record["model"])
    model = AutoConfig.for_model(values.pop("model_type"), **values)
    plan = Plan.from_json(record["plan"])
    workers, profiles = _pool(settings, len(plan.stages))
    planned = plan_stages(
        _capture(config, model),
        workers,
        stages=None,
        microbatches=config.microbatches,
        positions=plan.positions,
        profiles=profiles,
        dtype=_autocast(config),
    )
    return _Prepared(
        run=run,
        config=config,
        text=PreparedText(**record["text"]),
        model=model,
        tokenizer=load_tokenizer(config.tokenizer),
        planned=planned,
        output=output,
    )


def _autocast(config: PretrainConfig) -> str | None:
    return None if config.precision == "float32" else config.precision


def _capture(config: PretrainConfig, model: PretrainedConfig) -> Captured:
    return capture_model(model, batch=config.microbatch, context=config.context)


def _train(prepared: _Prepared, store: Store, settings: Settings, console: Console) -> Trained:
    config, text = prepared.config, prepared.text
    tokens = TokenArray(store, text.corpus)
    training = TokenWindows(
        tokens=tokens,
        start=0,
        stop=text.train_tokens,
        context=config.context,
        batch=config.microbatch,
        microbatches=config.microbatches,
        seed=config.seed,
    )
    held_out = TokenWindows(
        tokens=tokens,
        start=text.train_tokens,
        stop=text.tokens,
        context=config.context,
        batch=config.microbatch,
        microbatches=1,
        seed=None,
    )
    windows = min(held_out.windows, config.validation_windows)
    spec = RunSpec(
        run=prepared.run,
        seed=config.seed,
        store=store,
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate,
            warmup_steps=min(config.warmup, config.steps),
            total_steps=config.steps,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
        ),
        microbatches=config.microbatches,
        order=prepared.planned.order,
        owned=prepared.planned.owned,
        autocast=_autocast(config),
        data=training,
        validation=held_out,
        validation_microbatches=max(1, windows // config.microbatch),
    )
    request = TrainRequest(
        cluster=_cluster(settings),
        spec=spec,
        planned=prepared.planned,
        steps=config.steps,
        checkpoint_every=config.checkpoint_every,
        keep=config.keep_checkpoints,
        tokens_per_step=config.batch * config.context,
    )
    checkpoint = latest(store, prepared.run)
    done = 0 if checkpoint is None else checkpoint.step
    with progress(config.steps, console=console, done_steps=done) as advance:
        return train(request, advance)


def _finish(
    prepared: _Prepared, trained: Trained, store: Store, console: Console, begin: float
) -> PretrainResult:
    """Publish, report, and say where everything is."""
    model = publish_model(
        store,
        trained.checkpoint,
        prepared.planned.parameters,
        prepared.model,
        prepared.tokenizer,
        prepared.output / "model",
    )
    history = TrainingHistory(
        steps=trained.steps,
        validations=trained.validations,
        unigram_entropy=prepared.text.unigram_entropy,
    )
    summary = report_run(
        prepared.run,
        history,
        trained.stages,
        wall_s=time.monotonic() - begin,
        folder=prepared.output,
    )
    console.print(summary.rich())
    console.print(f"model: {model}\nloss curve: {prepared.output / 'loss.png'}", highlight=False)
    return PretrainResult(
        run=prepared.run,
        model=model,
        steps=len(trained.steps),
        train_loss=trained.steps[-1].loss,
        validation_loss=trained.validations[-1].loss,
        unigram_entropy=prepared.text.unigram_entropy,
    )


def _check_context(config: PretrainConfig, model: PretrainedConfig) -> None:
    longest: Any = getattr(model.get_text_config(), "max_position_embeddings", None)
    if longest is not None and config.context > longest:
        raise ModelError(
            f"context={config.context} is longer than the {longest} positions of {config.model}; "
            f"set context to at most {longest}"
        )


def _cluster(settings: Settings) -> str:
    if settings.cluster is None:
        raise ClusterError(
            "no cluster is known: start the flow with `fusion run pretrain`, or set FUSION_CLUSTER "
            "to the address of a Dask scheduler"
        )
    return settings.cluster


def _pool(settings: Settings, stages: int | None) -> tuple[list[str], dict[str, Profile]]:
    """The workers to plan for, and what was measured on them; backups only where they are needed."""
    with Client(_cluster(settings)) as client:
        workers = list(workers_of(client, backups=False))
        if stages is not None and stages > len(workers):
            workers = list(workers_of(client))
        return workers, profiles_of(client)


def _say_how_to_resume(run: str, store: Store, console: Console) -> None:
    checkpoint = latest(store, run)
    steps = len(past_steps(checkpoint)[0])
    kept = "no checkpoint yet" if checkpoint is None else f"its checkpoint of step {steps} is kept"
    console.print(
        f"run {run} ended early ({kept}); go on with: fusion run pretrain --resume {run}",
        highlight=False,
    )


def _new_name() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return f"pretrain-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
