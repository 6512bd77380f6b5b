"""The supervisor: keeps the services of a broker running until it is told to end.

Run by `fusion up`, in a session of its own:  python -P -m fusion_flows.cli.pool.supervisor HOME

Covers: starting, starting again with back-off, ending. Not covered: what the services are
(`services.py`). It ends by SIGTERM; the services end with it, however it ends (`group.py`).

Invariant: at most one runs in a home.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

from fusion_dask.errors import FusionError
from fusion_dask.security.state import load_state
from fusion_flows.cli.errors import CliError, InputError
from fusion_flows.cli.group import Child, ProcessGroup
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_flows.cli.pool.restart import Backoff, Restarts
from fusion_flows.cli.pool.services import Service, services

__all__ = ["main"]

POLL_S: Final = 0.2
LOG_BYTES: Final = 20_000_000

logger = logging.getLogger("fusion.broker")


class _Ended(Exception):
    """Somebody wants the supervisor to end."""


def main(home: Path) -> None:
    """Run the services of the pool in `home` until SIGTERM or SIGINT.

    Raises:
        InputError: There is no pool, or another supervisor.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    place = BrokerPlace(home=home)
    state = load_state(place.folder)
    if state is None:
        raise InputError(f"there is no pool in {home}; `fusion up` makes one")
    lock = place.claim()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    _shorten(place.logs)
    group = ProcessGroup(logs=place.logs)
    try:
        _keep_running(group, services(place, state, os.environ))
    except _Ended:
        logger.info("ending")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        group.stop()
        os.close(lock)


def _keep_running(group: ProcessGroup, wanted: list[Service]) -> None:
    history = {service.name: Restarts(policy=Backoff()) for service in wanted}
    running: dict[str, Child] = {}
    while True:
        now = time.monotonic()
        for service in wanted:
            child = running.get(service.name)
            if child is not None and child.exit_code is not None:
                logger.warning(
                    "%s ended with %s: %s", child.name, child.exit_code, child.last_words()
                )
                history[service.name] = history[service.name].ended(now)
                group.children.remove(running.pop(service.name))
            if history[service.name].is_due(now):
                running[service.name] = group.start(
                    service.name,
                    service.command,
                    environment=service.environment,
                    ask_to_end=True,
                    cwd=service.folder,
                )
                history[service.name] = history[service.name].started(now)
                logger.info("%s started", service.name)
        time.sleep(POLL_S)


def _shorten(logs: Path) -> None:
    """Start a log that has grown long anew; the one before is kept."""
    for log in logs.glob("*.log"):
        if log.stat().st_size > LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise _Ended


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (CliError, FusionError) as error:
        sys.exit(f"error: {error}")
