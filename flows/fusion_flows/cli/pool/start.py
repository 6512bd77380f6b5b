"""Carrying out `fusion up`: prepare, start the supervisor, wait, print.

Invariant: when it succeeds, every service answers; a supervisor of its own whose services do not all
answer in time is ended again.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

import s3fs  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
from rich.console import Console

from fusion_flows.cli import signals
from fusion_flows.cli.errors import StartError
from fusion_flows.cli.pool.books import address_of
from fusion_flows.cli.pool.decide import UpRequest
from fusion_flows.cli.pool.health import unhealthy
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_flows.cli.pool.services import BUCKET
from fusion_flows.cli.pool.setup import Prepared, prepare
from fusion_flows.cli.ports import LOOPBACK
from fusion_tasks import settings

__all__ = ["bring_up"]

READY_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.2
SUPERVISOR: Final = (sys.executable, "-P", "-m", "fusion_flows.cli.pool.supervisor")


def bring_up(request: UpRequest, *, foreground: bool) -> None:
    """Start the pool of this home, unless it is up, and say how to reach it.

    Raises:
        CliError: It cannot be started; the reason is the message.
        SecurityError: What was kept of it is damaged.
    """
    console = Console()
    place = BrokerPlace(home=settings.current().home)
    is_up = place.supervisor() is not None
    prepared = prepare(place, request, os.environ, is_up=is_up)
    if is_up:
        _wait_for_another(prepared, place, console)
        console.print("the pool is up already")
        _say(console, prepared, place)
        return
    signals.install()
    supervisor = _start(prepared, place, console)
    _say(console, prepared, place)
    if foreground:
        _follow(supervisor)


def _follow(supervisor: "subprocess.Popen[bytes]") -> None:
    """Live as long as the supervisor, and hand on what ends this process."""
    for number in signals.SIGNALS:
        signal.signal(number, lambda *_: supervisor.terminate())
    if (code := supervisor.wait()) != 0:
        raise StartError(f"the broker's supervisor ended with {code}; see its log")


def _start(prepared: Prepared, place: BrokerPlace, console: Console) -> "subprocess.Popen[bytes]":
    log = place.logs / "supervisor.log"
    with log.open("ab") as said:
        supervisor = subprocess.Popen(
            [*SUPERVISOR, str(place.home)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd="/",
            start_new_session=True,
        )
    try:
        with console.status("starting the broker") as status:
            _wait(lambda: _why_ended(supervisor, place), prepared, place, status.update)
        _make_bucket(prepared)
    except BaseException:
        # Ours, and not another one that was faster.
        supervisor.terminate()
        supervisor.wait(END_TIMEOUT_S)
        raise
    return supervisor


def _wait_for_another(prepared: Prepared, place: BrokerPlace, console: Console) -> None:
    """Until a broker that starts, or starts one of its services again, is whole."""

    def why_ended() -> str | None:
        ended = place.supervisor() is None
        return f"the broker ended; its logs are in {place.logs}" if ended else None

    with console.status("the broker runs") as status:
        _wait(why_ended, prepared, place, status.update)


def _why_ended(supervisor: "subprocess.Popen[bytes]", place: BrokerPlace) -> str | None:
    if supervisor.poll() is None:
        return None
    if place.supervisor() is not None:
        return "another `fusion up` starts the broker of this home; wait for it"
    if supervisor.returncode == 0:
        return "`fusion down` ended the broker while it started; call `fusion up` again"
    words = (place.logs / "supervisor.log").read_text().strip().splitlines()
    return f"the broker did not start: {words[-1] if words else 'it said nothing'}"


def _wait(
    why_ended: Callable[[], str | None],
    prepared: Prepared,
    place: BrokerPlace,
    tell: Callable[[str], None],
) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while missing := unhealthy(prepared.operator):
        tell(f"waiting for {', '.join(missing)}")
        if (reason := why_ended()) is not None:
            raise StartError(reason)
        if time.monotonic() > deadline:
            raise StartError(
                f"{', '.join(missing)} did not answer within {READY_TIMEOUT_S:g} s; their logs are in "
                f"{place.logs}"
            )
        time.sleep(POLL_S)


def _make_bucket(prepared: Prepared) -> None:
    operator = prepared.operator
    if not operator.own_store:
        return
    files = s3fs.S3FileSystem(
        key=operator.secrets["AWS_ACCESS_KEY_ID"],
        secret=operator.secrets["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=operator.secrets["AWS_ENDPOINT_URL"],
        client_kwargs={"verify": str(operator.ca)},
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    try:
        if not files.exists(BUCKET):
            files.mkdir(BUCKET)
    except (OSError, BotoCoreError) as error:
        raise StartError(f"the store does not take its bucket: {error}") from error


def _say(console: Console, prepared: Prepared, place: BrokerPlace) -> None:
    state = prepared.state
    lines = {
        "Prefect UI": f"{prepared.operator.prefect_url.removesuffix('/api')}"
        f"  (the password is PREFECT_API_AUTH_STRING in {place.folder / 'state.json'})",
        "scheduler": prepared.operator.scheduler,
        "store": state.store + ("" if state.ports.store is None else "  (this pool's own)"),
        "dashboard": f"http://{LOOPBACK}:{state.ports.dashboard}  (from this machine only)"
        if find_spec("bokeh")
        else "none; pip install bokeh for one",
        "logs": str(place.logs),
    }
    for name, text in lines.items():
        console.print(f"{name:<11}{text}", highlight=False, markup=False, soft_wrap=True)
    console.print("\non each machine with GPUs:", highlight=False)
    line = f"fusion join {address_of(state)} --token {prepared.token}"
    console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
