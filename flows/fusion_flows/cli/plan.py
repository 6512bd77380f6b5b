"""`fusion plan`: how a pool would run a model, before it runs.

Covers: the options and the order of things. Not covered: planning (`fusion_dask.planner`), what is
printed (`plan_show.py`).

Invariant: nothing is started or sent anywhere; of a live pool only its status is asked.
"""

import json
from typing import Annotated

import typer

from fusion_dask.planner.records import Objective

__all__ = ["plan"]


def plan(  # noqa: PLR0913 - one argument an option
    model: Annotated[
        str,
        typer.Argument(
            help="A shape such as llama-7b or gpt3-13b; or gpt, a Hugging Face folder or config.json, or "
            "my/model.py:name, which are captured."
        ),
    ],
    pool: Annotated[
        str,
        typer.Option(
            help="live: who lends to the pool of this home; devices such as 50*rtx3080 or "
            "2*rtx3080+rtx4090:0.5; or a file: `fusion status --json`, or a list of entries."
        ),
    ] = "live",
    link: Annotated[
        str | None,
        typer.Option(
            help="Between devices of the catalogue: bandwidth each way and delay one way, "
            "1gbit/20ms. By default a gigabit network in one building."
        ),
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches in a step.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a microbatch.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in a sequence. By default a shape's longest, and 256 of others."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the matrix products: bfloat16, float16 or float32.")
    ] = "bfloat16",
    objective: Annotated[
        Objective, typer.Option(help="What the plan makes best.")
    ] = Objective.THROUGHPUT,
    runnable: Annotated[
        bool,
        typer.Option(
            "--runnable",
            help="Only what `fusion run` can execute: one 1F1B pipeline without recomputation.",
        ),
    ] = False,
    cluster: Annotated[str | None, typer.Option(help="HOST[:PORT] of the live pool.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan for programs.")] = False,
) -> None:
    """Plan a model over a pool: stages, times, memory, what binds, what one more device brings.

    Nothing is started. With --pool none of the devices has to exist.
    """
    from rich.console import Console

    from fusion_dask.planner.advice import Task, advise
    from fusion_dask.planner.records import ANY, ENGINE, Workload
    from fusion_flows.cli.plan_inputs import read_model, read_pool
    from fusion_flows.cli.plan_show import check_priced, find, print_plan, to_json

    members = read_pool(pool, link=link, cluster=cluster)
    check_priced(members, objective)
    task = Task(
        model=read_model(model, batch=batch, context=context, dtype=dtype),
        pool=members.workers,
        workload=Workload(microbatches=microbatches),
        objective=objective,
        capabilities=ENGINE if runnable else ANY,
    )
    with Console(stderr=True).status("planning"):
        found = find(task)
        advice = advise(task, found)
    if as_json:
        print(json.dumps(to_json(task, found, advice, members), indent=1))  # noqa: T201
    else:
        print_plan(Console(), task, found, advice, members)
