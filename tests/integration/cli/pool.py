"""A pool on the loopback: a broker of `fusion up`, and providers that tests start and end."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from distributed import rpc
from distributed.security import Security

from fusion_dask.security.identity import pools
from fusion_dask.security.roles import Role
from fusion_flows.cli.ports import choose
from integration.cli.command import MARK, Command, Finished, poll

__all__ = ["ENVIRONMENT", "Pool", "marked", "token_of"]

#: Enough for a tiny probe; what is measured is not the subject of these tests.
ENVIRONMENT = {"FUSION_PROBE_S": "0.2"}


def marked(mark: str) -> list[psutil.Process]:
    """The processes that carry a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@dataclass
class Pool:
    """Commands of one home that holds a broker."""

    folder: Path
    ports: tuple[int, ...] = field(default_factory=lambda: choose(5))
    providers: list[Command] = field(default_factory=list)
    # Of its own: the tests of another checkout may run on this machine.
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def scheduler(self) -> str:
        return f"tls://127.0.0.1:{self.ports[1]}"

    @property
    def log(self) -> str:
        return (self.home / "broker" / "logs" / "supervisor.log").read_text()

    def fusion(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 150
    ) -> Finished:
        """Run a command on the broker's machine."""
        command = Command(
            folder=self.folder, home=self.home, mark=self.mark, environment=environment or {}
        )
        command.start(*arguments)
        return command.finish(timeout_s)

    def up(self) -> Finished:
        options = (
            "--port",
            "--scheduler-port",
            "--prefect-port",
            "--store-port",
            "--dashboard-port",
        )
        pairs = zip(options, self.ports, strict=True)
        words = [word for option, port in pairs for word in (option, str(port))]
        first = not (self.home / "broker").exists()
        finished = self.fusion("up", *(["--host", "127.0.0.1", *words] if first else []))
        assert finished.code == 0, finished.err
        return finished

    def token(self, *options: str) -> str:
        """A new token."""
        made = self.fusion("token", "new", *options)
        assert made.code == 0, made.err
        return made.out.split("--token ")[1].strip()

    def join(
        self,
        name: str,
        *options: str,
        token: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Command:
        """Start a provider in a home of its own; it is not waited for."""
        folder = self.folder / f"provider-{name}"
        folder.mkdir(exist_ok=True)
        given = {} if token is None else {"FUSION_TOKEN": token}
        command = Command(
            folder=folder,
            home=folder / "home",
            environment={**ENVIRONMENT, **given, **(environment or {})},
        )
        command.start("join", self.address, "--name", name, *options)
        self.providers.append(command)
        return command

    def status(self) -> dict[str, dict[str, Any]]:
        """The members by name; none while the scheduler does not answer."""
        answer = self._ask("fusion_status")
        return {} if answer is None else {m["name"]: m for m in answer["members"]}

    def workers(self) -> list[str]:
        """The addresses that Dask knows."""
        answer = self._ask("identity")
        return [] if answer is None else list(answer["workers"])

    def _ask(self, operation: str) -> Any:
        """Asked as the operator, whose membership is in the home."""
        (identity,) = [i for i in pools(self.home) if i.role is Role.USER]
        credentials = Security(
            require_encryption=True,
            tls_ca_file=str(identity.ca),
            tls_client_cert=str(identity.certificate),
            tls_client_key=str(identity.key),
        ).get_connection_args("client")

        async def ask() -> Any:
            async with rpc(self.scheduler, connection_args=credentials, timeout=5) as scheduler:
                return await getattr(scheduler, operation)()

        try:
            return asyncio.run(ask())
        except OSError:
            return None

    def wait(
        self, condition: Callable[[dict[str, dict[str, Any]]], bool]
    ) -> dict[str, dict[str, Any]]:
        """The members, as soon as the condition holds."""
        deadline = time.monotonic() + 90
        while not condition(members := self.status()):
            states = {name: (m["state"], m["reason"]) for name, m in members.items()}
            assert time.monotonic() < deadline, states
            time.sleep(0.2)
        return members

    def wait_for(self, state: str, *names: str) -> dict[str, dict[str, Any]]:
        """The members, as soon as these are in that state."""
        return self.wait(lambda ms: all(n in ms and ms[n]["state"] == state for n in names))

    def service(self, name: str) -> psutil.Process:
        """The process of a service of the broker."""
        words = {"scheduler": "dask_scheduler", "gateway": "security.gateway", "store": "mini"}
        (found,) = [p for p in marked(self.mark) if any(words[name] in w for w in p.cmdline())]
        return found

    def supervisor(self) -> psutil.Process:
        return psutil.Process(int((self.home / "broker" / "supervisor.lock").read_text()))

    def close(self) -> None:
        for provider in self.providers:
            provider.kill()
            provider.finish(30)
        self.fusion("down")
        poll(lambda: not marked(self.mark), 30)


def token_of(finished: Finished) -> str:
    """The token in what `fusion up` printed."""
    match = re.search(r"--token (fusion-\S+)", finished.out)
    assert match is not None, finished.out
    return match[1]
