"""The options that `fusion plan` and `fusion simulate` share: what work on which pool."""

from typing import Annotated, Final

import typer

__all__ = [
    "MODEL_HELP",
    "BatchOption",
    "ClusterOption",
    "ContextOption",
    "DtypeOption",
    "LinkOption",
    "MicrobatchesOption",
    "PoolOption",
]

MODEL_HELP: Final = (
    "A shape such as llama-7b or gpt3-13b; or gpt, a Hugging Face folder or config.json, or "
    "my/model.py:name, which are captured."
)
PoolOption = Annotated[
    str,
    typer.Option(
        help="live: who lends to the pool of this home; devices such as 50*rtx3080 or "
        "2*rtx3080+rtx4090:0.5; or a file: `fusion status --json`, or a list of entries."
    ),
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        help="Between devices of the catalogue: bandwidth each way and delay one way, "
        "1gbit/20ms. By default a gigabit network in one building."
    ),
]
MicrobatchesOption = Annotated[int, typer.Option(min=1, help="Microbatches in a step.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences in a microbatch.")]
ContextOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens in a sequence. By default a shape's longest, and 256 of others."
    ),
]
DtypeOption = Annotated[
    str, typer.Option(help="Of the matrix products: bfloat16, float16 or float32.")
]
ClusterOption = Annotated[str | None, typer.Option(help="HOST[:PORT] of the live pool.")]
