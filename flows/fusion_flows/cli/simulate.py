"""`fusion simulate`: what a pool would do over hours, before it is bought.

Covers: the options and the order of things. Not covered: simulating (`fusion_dask.planner`), what is
printed (`simulate_show.py`, `simulate_headline.py`) and drawn (`simulate_gantt.py`).

Invariant: nothing is started or sent anywhere; of a live pool only its status is asked. The same
options give the same result.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from fusion_flows.cli.plan_options import (
    MODEL_HELP,
    BatchOption,
    ClusterOption,
    ContextOption,
    DtypeOption,
    LinkOption,
    MicrobatchesOption,
    PoolOption,
)

__all__ = ["simulate"]


def simulate(  # noqa: PLR0913 - one argument an option
    model: Annotated[
        str,
        typer.Option(help=MODEL_HELP),
    ] = "llama-7b",
    pool: PoolOption = "live",
    link: LinkOption = None,
    churn: Annotated[
        str, typer.Option(help="How often each worker leaves, 0.1/h; or a .json file, a trace.")
    ] = "0/h",
    away: Annotated[
        float, typer.Option(min=0.001, help="Hours until one that left is back, on average.")
    ] = 1.0,
    hours: Annotated[float, typer.Option(min=0.0, help="Hours to simulate.")] = 24.0,
    checkpoint: Annotated[
        float, typer.Option(min=0.0, help="Minutes between two checkpoints.")
    ] = 10.0,
    journal: Annotated[
        bool,
        typer.Option(
            help="A lost stage is replayed alone; without, all go back to the last checkpoint."
        ),
    ] = True,
    spare: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Workers kept in the backup pool. By default as many as are away on average.",
        ),
    ] = None,
    microbatches: MicrobatchesOption = 128,
    batch: BatchOption = 1,
    context: ContextOption = None,
    dtype: DtypeOption = "bfloat16",
    runnable: Annotated[
        bool,
        typer.Option(
            "--runnable",
            help="Only plans that `fusion run` can execute: one 1F1B pipeline without "
            "recomputation.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the churn.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a Gantt picture (.html) or everything (.json).", metavar="FILE"),
    ] = None,
    headline: Annotated[
        bool,
        typer.Option("--headline", help="The paper's analysis instead: 50 RTX 3080 or 4 H100?"),
    ] = False,
    cluster: ClusterOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result for programs.")] = False,
) -> None:
    """Simulate hours of training a model on a pool: speed, losses, memory, energy, cost.

    With --pool none of the devices has to exist.
    """
    from rich.console import Console

    if headline:
        from fusion_flows.cli.simulate_headline import print_headline, to_json

        if as_json:
            print(json.dumps(to_json(), indent=1))  # noqa: T201
        else:
            print_headline(Console())
        return
    from fusion_flows.cli.simulate_run import Asked, run
    from fusion_flows.cli.simulate_show import check_out, print_simulation, write

    check_out(out)
    asked = Asked(
        model=model,
        pool=pool,
        link=link,
        churn=churn,
        away_s=away * 3600,
        until_s=hours * 3600,
        checkpoint_s=checkpoint * 60,
        journal=journal,
        spare=spare,
        microbatches=microbatches,
        batch=batch,
        context=context,
        dtype=dtype,
        runnable=runnable,
        seed=seed,
        cluster=cluster,
    )
    with Console(stderr=True).status("planning and simulating"):
        result = run(asked)
    if as_json:
        print(json.dumps(result.to_json(), indent=1))  # noqa: T201
    else:
        print_simulation(Console(), result)
    if out is not None:
        write(result, out)
