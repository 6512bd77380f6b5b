"""The Prefect tasks at the end of a run: publish the model, report what happened."""

import base64
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from fusion_storage.checkpoint import Checkpoint, read_tensors
from fusion_storage.store import Store
from fusion_tasks.artifacts import artifact_key
from fusion_tasks.publish import publish
from fusion_tasks.records import StageReport, TrainingHistory
from fusion_tasks.report import Summary, loss_curve_png, summary_table

__all__ = ["publish_model", "report_run"]


@task(cache_policy=NO_CACHE)
def publish_model(
    store: Store,
    checkpoint: Checkpoint,
    names: Sequence[str],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
) -> Path:
    """Write a checkpoint's parameters as a Hugging Face directory.

    Args:
        store: Where the checkpoint is.
        checkpoint: What to publish.
        names: The parameters, by their names in the model.
        config: The model's configuration.
        tokenizer: Goes with it.
        directory: Must not exist.

    Raises:
        PublishError: The directory exists or cannot be written.
        IntegrityError: The checkpoint is damaged.
    """
    tensors = read_tensors(checkpoint, store, names)
    return publish(directory, config, tokenizer, tensors)


@task(cache_policy=NO_CACHE)
def report_run(
    run: str,
    history: TrainingHistory,
    stages: Sequence[StageReport],
    *,
    wall_s: float,
    folder: Path,
) -> Summary:
    """Draw the loss curve, make the summary, and keep both as Prefect artifacts.

    Args:
        run: The run's name; keys of the artifacts begin with it.
        history: The run's steps and evaluations.
        stages: Where the stages' time went.
        wall_s: Wall time of the procedure so far.
        folder: Gets `loss.png` and `summary.md`.
    """
    picture = loss_curve_png(history, folder / "loss.png")
    summary = summary_table(history, stages, wall_s=wall_s)
    (folder / "summary.md").write_text(summary.markdown(), encoding="utf-8")
    data = base64.b64encode(picture.read_bytes()).decode()
    create_image_artifact(
        image_url=f"data:image/png;base64,{data}",
        key=artifact_key(run, "loss"),
        description="Loss curve",
    )
    create_table_artifact(table=summary.stages.records(), key=artifact_key(run, "stages"))
    create_markdown_artifact(markdown=summary.markdown(), key=artifact_key(run, "summary"))
    return summary
