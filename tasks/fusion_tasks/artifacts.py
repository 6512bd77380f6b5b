"""Names of Prefect artifacts. Prefect allows lower-case letters, digits and dashes only."""

import re

__all__ = ["artifact_key"]


def artifact_key(run: str, what: str) -> str:
    """The key of one of a run's artifacts.

    >>> artifact_key("my_run.v2", "loss")
    'my-run-v2-loss'
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{what}".lower()).strip("-")
