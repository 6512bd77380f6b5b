"""What a person sees of the logs of their flow and tasks.

Covers: the console of the flow process and, as a Dask preload, of the workers. Messages of the
person's own code pass, those of Prefect's engine from warnings on. Not covered: what the Prefect
server stores, which is everything.

Invariant: a failure is reported once by the command line; here it is only announced.
"""

import logging
import sys
from pathlib import Path
from typing import Final

import prefect
import prefect.main
from distributed import Worker
from prefect.logging.configuration import ensure_logging_setup
from prefect.logging.handlers import PrefectConsoleHandler

from fusion_dask.errors import FusionError
from fusion_storage.errors import StorageError

__all__ = ["dask_setup", "install"]

ENGINE: Final = str(Path(prefect.__file__).parent)
KNOWN_ERRORS: Final = (FusionError, StorageError)


def install() -> None:
    """Filter the console of this process, unless Prefect was asked to be verbose."""
    # `prefect.main` sets the levels once more when it is first imported: it is, above.
    ensure_logging_setup()
    if logging.getLogger("prefect").getEffectiveLevel() < logging.WARNING:
        return
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_concerns_the_person)


async def dask_setup(worker: Worker) -> None:
    """Called by Dask when the worker starts; Prefect is imported by then, before the first task."""
    del worker
    install()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            # Stderr of a worker goes to its log, stdout to the person.
            handler.console.file = sys.stdout


def _concerns_the_person(record: logging.LogRecord) -> bool:
    if not record.pathname.startswith(ENGINE) or record.funcName == "print_as_log":
        return True
    error = record.exc_info[1] if record.exc_info else None
    if record.levelno < logging.WARNING or isinstance(error, KNOWN_ERRORS):
        return False
    if record.filename == "flow_engine.py" or record.getMessage().startswith("Finished in"):
        return False
    # The console is the last handler to see it.
    record.exc_info = record.exc_text = None
    return True
