"""The configuration of `pretrain`: every name that `--set` takes, with its bounds and default.

Covers what can be checked before anything is started. Does not cover whether the text is enough or
the model can be cut as asked: the flow finds that out.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

__all__ = ["RESUMING", "PretrainConfig"]


def _existing(path: str | None, info: ValidationInfo) -> str | None:
    """A path that is there, unless the run was prepared long ago and needs it no more."""
    if path is not None and info.context is not RESUMING and not Path(path).expanduser().exists():
        raise ValueError(f"there is no file or folder {path}")
    return path


def _known_model(model: str, info: ValidationInfo) -> str:
    if model != "gpt":
        _existing(model, info)
    return model


#: The validation context of a run that goes on: what it was made from may be gone by now.
RESUMING = {"resuming": True}


class PretrainConfig(BaseModel):
    """Everything that decides what `pretrain` computes."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    data: Annotated[str | None, AfterValidator(_existing)] = Field(
        None,
        description="File or folder of UTF-8 text; by default the Python standard library's sources.",
    )
    tokenizer: Annotated[str | None, AfterValidator(_existing)] = Field(
        None, description="A tokenizers file or tokenizer folder; by default one token per byte."
    )
    model: Annotated[str, AfterValidator(_known_model)] = Field(
        "gpt",
        description="'gpt' for a GPT-style decoder of the sizes below, or a Hugging Face folder or "
        "config.json of any causal language model.",
    )
    layers: int = Field(4, ge=1, description="Blocks of 'gpt'.")
    width: int = Field(128, ge=1, description="Width of 'gpt'.")
    heads: int = Field(4, ge=1, description="Attention heads of 'gpt'.")
    context: int = Field(128, ge=2, description="Tokens in a window.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout of 'gpt'.")
    steps: int = Field(200, ge=1, description="Optimizer updates.")
    batch: int = Field(16, ge=1, description="Windows in a global batch.")
    microbatches: int = Field(4, ge=1, description="Parts of a global batch; divides batch.")
    stages: int | None = Field(None, ge=1, description="Stages; by default one per worker.")
    learning_rate: float = Field(2e-3, gt=0.0, description="Peak learning rate.")
    warmup: int = Field(20, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.1, ge=0.0, description="AdamW's decay of matrices.")
    clip_norm: float | None = Field(
        1.0, gt=0.0, description="Largest global gradient norm; null for none."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16 is automatic mixed precision with fp32 parameters."
    )
    checkpoint_every: int = Field(50, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(3, ge=1, description="Checkpoints that are kept.")
    validation_fraction: float = Field(
        0.02, gt=0.0, lt=1.0, description="Share of the text that is held out."
    )
    validation_windows: int = Field(128, ge=1, description="Windows in an evaluation, at most.")
    seed: int = Field(0, ge=0, description="Seeds parameters, order of the data and dropout.")
    name: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$",
        description="Name of the run; by default made of the time.",
    )
    output: Path | None = Field(
        None, description="Folder for model, loss curve and summary; by default fusion-runs/NAME."
    )

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.batch % self.microbatches:
            raise ValueError(
                f"batch={self.batch} is not a multiple of microbatches={self.microbatches}"
            )
        return self

    @property
    def microbatch(self) -> int:
        """Windows in a microbatch."""
        return self.batch // self.microbatches
