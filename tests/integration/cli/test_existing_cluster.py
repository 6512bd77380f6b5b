"""`--cluster`: a Dask cluster that somebody else runs, with a plain scheduler and worker."""

from collections.abc import Callable

from integration.cli.command import Command

FLOWS = """
import os
from prefect import flow, task
from fusion_dask.errors import PlanError

@task
def where():
    return os.getpid()

@task
def refuse():
    raise PlanError("3 stages need 3 workers; start more of them")

@flow
def good():
    print("ran in", os.getpid(), "and", where.submit().result())

@flow
def bad(resume: str | None = None):
    refuse.submit().result()
"""


def test_a_plain_flow_runs_there(command: Command, write: Callable[..., str], cluster: str) -> None:
    done = command.run("run", f"{write(FLOWS)}:good", "--cluster", cluster)

    assert done.code == 0, done.err
    _, _, own, _, task = done.out.split()
    assert own != task
    command.assert_nothing_left()


def test_an_error_of_the_engine_is_one_line(
    command: Command, write: Callable[..., str], cluster: str
) -> None:
    command.environment = {"FUSION_CLUSTER": cluster}

    done = command.run("run", f"{write(FLOWS)}:bad", "--resume", "some-run")

    assert done.code == 1
    assert done.error_lines[1:] == ["error: 3 stages need 3 workers; start more of them"]
    command.assert_nothing_left()
