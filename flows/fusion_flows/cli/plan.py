"""`fusion plan`: how a pool would run a model, before it runs.

Covers: the options and the order of things. Not covered: planning (`fusion_dask.planner`), what is
printed (`plan_show.py`).

Invariant: nothing is started or sent anywhere; of a live pool only its status is asked.
"""

import json
from typing import Annotated

import typer

from fusion_dask.planner.records import Objective
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

__all__ = ["plan"]


def plan(  # noqa: PLR0913 - one argument an option
    model: Annotated[
        str,
        typer.Argument(help=MODEL_HELP),
    ],
    pool: PoolOption = "live",
    link: LinkOption = None,
    microbatches: MicrobatchesOption = 128,
    batch: BatchOption = 1,
    context: ContextOption = None,
    dtype: DtypeOption = "bfloat16",
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
    cluster: ClusterOption = None,
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
