"""`fusion graph`: a model as a graph of operators, cut into stages, before anything is trained.

Covers: the options and the order of things. Not covered: finding the model (`graph_target.py`),
the numbers and the picture (`fusion_dask.graph`).

Invariant: nothing is started, nothing is downloaded, and no weight is given memory.
"""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["graph"]


def graph(  # noqa: PLR0913 - one argument an option
    model: Annotated[
        str,
        typer.Argument(
            help="gpt, a Hugging Face folder or config.json, or my/model.py:name, a function that "
            "returns a module with its loss and a dict of example inputs."
        ),
    ],
    stages: Annotated[int, typer.Option(min=1, help="Stages to cut it into.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a picture (.svg, .html) or the numbers (.json).", metavar="FILE"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a microbatch.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of gpt.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Width of gpt.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads of gpt.")] = 4,
    vocab_size: Annotated[int, typer.Option(min=1, help="Vocabulary of gpt.")] = 256,
) -> None:
    """Show a model as a graph of operators, cut into stages.

    Prints a row for each stage: operators, parameters, FLOPs of a microbatch forward and backward,
    bytes sent to later stages, and the peak memory in training with Adam and 1F1B.
    """
    # torch and transformers take seconds to import: not for `fusion --help`.
    from fusion_dask.errors import FusionError
    from fusion_flows.cli.errors import InputError
    from fusion_flows.cli.graph_show import check_out, cut_in_stages, print_table, write
    from fusion_flows.cli.graph_target import Sizes, load

    check_out(out)
    sizes = Sizes(
        batch=batch,
        context=context,
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=vocab_size,
    )
    try:
        module, inputs = load(model, sizes)
        programs = cut_in_stages(module, inputs, stages)
    except FusionError as error:
        raise InputError(str(error)) from error
    print_table(programs)
    if out is not None:
        write(programs, out, title=f"{model}, {stages} stages")
