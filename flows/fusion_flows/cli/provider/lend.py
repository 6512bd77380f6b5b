"""Running the workers of this machine for a pool: the driver of `lending.py`.

Covers: starting and ending worker processes, asking the broker, telling the person what changed. Dask is
imported here, so the membership has to be in the environment. Not covered: deciding (`lending.py`).

Invariant: whatever ends this process ends its workers; the second Ctrl-C ends it at once.
"""

import datetime as dt
import os
import random
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from rich.console import Console

from fusion_dask.config import as_environment
from fusion_dask.devices.share import Share
from fusion_dask.errors import ClusterError, SecurityError
from fusion_dask.security.identity import Identity
from fusion_flows.cli import signals
from fusion_flows.cli.cluster import PYTHON, WORKER
from fusion_flows.cli.environment import OFFLINE
from fusion_flows.cli.errors import ChildLost
from fusion_flows.cli.group import Child, ProcessGroup
from fusion_flows.cli.pool.restart import Backoff, Restarts
from fusion_flows.cli.provider.lending import Act, Lending, Seen
from fusion_flows.cli.provider.window import Window
from fusion_flows.cli.scheduler import ask
from fusion_flows.cli.table import describe

__all__ = ["lend"]

POLL_S: Final = 0.5
STATUS_S: Final = 2.0
#: A worker without a scheduler ends after this, and is started again with back-off.
DEATH_TIMEOUT_S: Final = 30
#: How the log of a worker ends that found something wrong with this machine.
OWN_ERROR: Final = re.compile(r"error: (.+)")
#: What the log of a worker says that was not let in, by the broker or by the guard; the system's own
#: "Connection refused" means that nobody is there.
REFUSED: Final = re.compile(r"(?<!Connection )refused(?: by the broker)?: ([^|]+)")


class _Provider:
    """The workers of this machine and what is known of them."""

    def __init__(
        self, identity: Identity, shares: Mapping[str, Share], extra: Mapping[str, str]
    ) -> None:
        self._identity = identity
        self._shares = shares
        self._extra = extra
        self._group = ProcessGroup()
        self._children: dict[str, Child] = {}
        self._told: dict[str, str] = {}
        self._looked = 0.0
        self._console = Console(stderr=True)
        self.state = Lending(history={name: Restarts(policy=Backoff()) for name in shares})

    @property
    def runs(self) -> bool:
        return bool(self._children)

    def step(self, *, wanted: bool) -> None:
        """Look, decide, act."""
        ended = {n: child for n, child in self._children.items() if child.exit_code is not None}
        for name in ended:
            self._group.children.remove(self._children.pop(name))
        asks = bool(self._children) and (not wanted or bool(self.state.leaving))
        seen = Seen(
            now=time.monotonic(),
            wanted=wanted,
            ended=frozenset(ended),
            busy=self._busy() if asks else None,
            chance=random.random(),
        )
        told_to_end = self.state.ending
        self.state, acts = self.state.after(seen)
        for name, child in ended.items():
            if name in told_to_end:
                self._told.pop(name, None)
                self.say(f"{name} left")
            else:
                self._mourn(name, child, seen)
        for act in acts:
            self._act(act)
        if time.monotonic() - self._looked >= STATUS_S:
            self._looked = time.monotonic()
            self._tell()

    def close(self) -> None:
        self._group.stop()

    def _act(self, act: Act) -> None:
        if act.what != "start":
            process = self._children[act.worker].process
            process.terminate() if act.what == "end" else process.kill()
            return
        host = _route_to(self._identity.scheduler)
        command = [*PYTHON, "distributed.cli.dask_worker", self._identity.scheduler, *WORKER]
        command += ["--name", act.worker, "--host", host]
        command += ["--local-directory", str(self._group.folder)]
        command += ["--death-timeout", str(DEATH_TIMEOUT_S)]
        environment = {
            **as_environment(),
            **OFFLINE,
            **os.environ,
            **self._extra,
            **self._shares[act.worker].as_environment(),
            "PYTHONUNBUFFERED": "1",
        }
        self._children[act.worker] = self._group.start(
            act.worker, command, environment=environment, shares_stdout=True, ask_to_end=True
        )

    def _mourn(self, name: str, child: Child, seen: Seen) -> None:
        """Say that a worker ended by itself, and when it is started again.

        Raises:
            ChildLost: It may not join.
        """
        has_joined = self._told.pop(name, None) is not None
        refused = REFUSED.search(child.last_words(lines=40))
        if refused is not None and not has_joined:
            raise ChildLost(f"{name} may not join: {refused[1].strip()}")
        own_error = OWN_ERROR.search(child.last_words(lines=1))
        why = f" (exit code {child.exit_code})" if own_error is None else f": {own_error[1]}"
        due_at = self.state.history[name].due_at
        again = f"; started again in {due_at - seen.now:.0f} s" if seen.wanted and due_at else ""
        self.say(f"{name} {'is lost' if has_joined else 'did not join'}{why}{again}")

    def _busy(self) -> Mapping[str, bool] | None:
        try:
            answer = self._ask("fusion_drain", provider=self._extra["FUSION_PROVIDER"])
        except ClusterError:
            if not self._told:
                # None has joined, so none is needed.
                return {}
            if self.state.silent_since is None:
                self.say("the broker does not answer; leaving soon, or at once with Ctrl-C")
            return None
        workers = {worker["name"]: worker["busy"] for worker in answer["workers"].values()}
        for name in sorted(name for name, is_busy in workers.items() if is_busy):
            if self._told.get(name) != "waits":
                self._told[name] = "waits"
                self.say(f"{name} finishes its segment first; Ctrl-C again leaves at once")
        return workers

    def _tell(self) -> None:
        """Say what the broker believes of our workers, where it has changed."""
        try:
            status = self._ask("fusion_status")
        except ClusterError:
            return
        for member in status["members"]:
            name = member["name"]
            if name not in self._children or member["state"] == "left":
                continue
            if self._told.get(name) not in {member["state"], "waits"}:
                self._told[name] = member["state"]
                self.say(f"{name} is {member['state']}{describe(member)}")

    def _ask(self, operation: str, **arguments: Any) -> Any:  # noqa: ANN401 - JSON
        try:
            return ask(self._identity.scheduler, operation, **arguments)
        except SecurityError as error:
            raise ChildLost(f"this machine may not join: {error}") from None

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def lend(
    identity: Identity,
    shares: Sequence[Share],
    *,
    name: str,
    window: Window | None,
    backup: bool,
) -> None:
    """Run workers until the person wants to leave.

    Args:
        identity: The membership; it is in the environment.
        shares: One worker for each.
        name: Of this provider.
        window: When they are lent; None for always.
        backup: Whether they are for the backup pool.

    Raises:
        ChildLost: The broker refused a worker.
    """
    extra = {"FUSION_PROVIDER": name, "FUSION_BACKUP": "1" if backup else "0"}
    named = {f"{name}-{index}": share for index, share in enumerate(shares)}
    received, was_open = signals.listen(), None
    provider = _Provider(identity, named, extra)
    try:
        while provider.runs or not received:
            is_open = window is None or window.is_open(dt.datetime.now().time())
            if window is not None and is_open != was_open and not received:
                provider.say(window.told(is_open=is_open))
            was_open = is_open
            provider.step(wanted=is_open and not received)
            time.sleep(POLL_S)
    finally:
        provider.close()


def _route_to(scheduler: str) -> str:
    """The address of this machine from which the scheduler is reached; nothing is sent."""
    parts = urlsplit(scheduler)
    host, port = parts.hostname or "", parts.port or 0
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
            return str(probe.getsockname()[0])
        except OSError:
            return host
