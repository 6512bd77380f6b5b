"""The services of a broker: their commands and environments.

    gateway      enrols members                       HTTPS, a token
    scheduler    Dask's, with the broker in it        mutual TLS
    prefect      Prefect's API and UI                 HTTPS, a password
    store        SeaweedFS's inner parts              loopback only, mutual TLS between them
    store-s3     its S3 interface                     HTTPS, S3 signatures

Dask's dashboard has no authentication and listens on the loopback. Prefect's own command cannot speak TLS;
uvicorn runs its application instead.

Invariant: no secret is in a command; what is not TLS listens on the loopback.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_urlsafe
from typing import Final

from fusion_dask.config import as_environment
from fusion_dask.security.files import make_private_folder, write_private
from fusion_dask.security.state import BrokerState
from fusion_flows.cli.environment import OFFLINE
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_flows.cli.ports import LOOPBACK, choose

__all__ = ["BUCKET", "Service", "find_weed", "services"]

PYTHON: Final = (sys.executable, "-P", "-m")
BUCKET: Final = "fusion"
#: The parts of SeaweedFS that prove themselves to each other.
PARTS: Final = ("master", "volume", "filer", "s3", "client", "admin", "worker")
#: What they sign for each other, so that nobody else is answered: anew at each start.
SIGNED: Final = ("signing", "signing.read", "filer_signing", "filer_signing.read")
OFFSET: Final = 10000
DATABASE: Final = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A process to keep running; `folder` is the one that it runs in, if it matters."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None = None


def find_weed() -> str | None:
    """SeaweedFS's program: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def services(place: BrokerPlace, state: BrokerState, environ: Mapping[str, str]) -> list[Service]:
    """All services of a pool, the slowest first; writes the configuration that they read."""
    # What opens a database or another store is for those who use it.
    plain = {k: v for k, v in environ.items() if k != DATABASE and not k.startswith("AWS_")}
    base = {**as_environment(), **OFFLINE, **plain, "PYTHONUNBUFFERED": "1"}
    sqlite = f"sqlite+aiosqlite:///{place.folder / 'prefect.db'}"
    made = [
        _prefect(place, state, {**base, DATABASE: environ.get(DATABASE) or sqlite}),
        _scheduler(place, state, base),
        Service(
            name="gateway",
            command=(*PYTHON, "fusion_dask.security.gateway", str(place.folder)),
            environment=base,
        ),
    ]
    return made if state.ports.store is None else [*_store(place, state, base), *made]


def _prefect(place: BrokerPlace, state: BrokerState, base: Mapping[str, str]) -> Service:
    environment = {
        **base,
        "PREFECT_HOME": str(place.folder / "prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": state.secrets["PREFECT_API_AUTH_STRING"],
        # Relative: the page asks the server that it came from, by whatever name.
        "PREFECT_UI_API_URL": "/api",
        "PREFECT__SERVER_FINAL": "1",
    }
    certificate, key = place.folder / "server.pem", place.folder / "server.key"
    command = [*PYTHON, "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", state.host, "--port", str(state.ports.prefect)]
    command += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    command += ["--log-level", "warning", "--timeout-keep-alive", "5"]
    return Service(name="prefect", command=tuple(command), environment=environment)


def _scheduler(place: BrokerPlace, state: BrokerState, base: Mapping[str, str]) -> Service:
    certificate, key = place.folder / "server.pem", place.folder / "server.key"
    command = [*PYTHON, "distributed.cli.dask_scheduler", "--protocol", "tls"]
    command += ["--host", state.host, "--port", str(state.ports.scheduler)]
    command += ["--tls-ca-file", str(place.authority / "ca.pem")]
    command += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    # Without the option its web server would listen on every address.
    command += ["--dashboard-address", f"{LOOPBACK}:{state.ports.dashboard}"]
    command += [] if find_spec("bokeh") else ["--no-dashboard"]
    command += ["--preload", "fusion_dask.broker", "--preload", "prefect_dask"]
    environment = {
        **base,
        "FUSION_BROKER_STATE": str(place.folder),
        "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
        "PREFECT_HOME": str(place.folder / "prefect"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    }
    return Service(name="scheduler", command=tuple(command), environment=environment)


def _store(place: BrokerPlace, state: BrokerState, base: Mapping[str, str]) -> list[Service]:
    folder = place.folder / "seaweedfs"
    data = folder / "data"
    make_private_folder(folder)
    make_private_folder(data)
    weed = find_weed()
    assert weed is not None
    _write_configuration(place, state, folder)
    # Only its own parts use these, so they need not stay the same.
    master, volume, filer, admin, inner = choose(5, below=65536 - OFFSET)
    both = (
        "-webdav=false",
        "-admin.ui=false",
        "-s3=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    )
    store = [weed, "mini", f"-dir={data}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}", *both]
    for part, port in {"master": master, "volume": volume, "filer": filer, "admin": admin}.items():
        store += [f"-{part}.port={port}", f"-{part}.port.grpc={port + OFFSET}"]
    s3 = [weed, "s3", f"-port={state.ports.store}", f"-port.grpc={inner}", f"-ip={LOOPBACK}"]
    s3 += [f"-ip.bind={state.host}", f"-filer={LOOPBACK}:{filer}.{filer + OFFSET}"]
    s3 += [f"-cert.file={place.folder / 'server.pem'}", f"-key.file={place.folder / 'server.key'}"]
    s3 += [f"-config={folder / 's3.json'}", "-port.iceberg=0", "-port.lance=0"]
    # It looks for security.toml in the folder that it runs in.
    return [
        Service(name="store", command=tuple(store), environment=base, folder=folder),
        Service(name="store-s3", command=tuple(s3), environment=base, folder=folder),
    ]


def _write_configuration(place: BrokerPlace, state: BrokerState, folder: Path) -> None:
    certificate, key = place.folder / "server.pem", place.folder / "server.key"
    lines = ["[grpc]", f"ca = {json.dumps(str(place.authority / 'ca.pem'))}"]
    for part in PARTS:
        lines += [f"[grpc.{part}]", f"cert = {json.dumps(str(certificate))}"]
        lines += [f"key = {json.dumps(str(key))}"]
    for part in SIGNED:
        # Its parts speak HTTP on the loopback: other users of this machine are not let in either.
        lines += [f"[jwt.{part}]", f'key = "{token_urlsafe(24)}"']
    write_private(folder / "security.toml", "\n".join(lines).encode())
    credentials = {
        "accessKey": state.secrets["AWS_ACCESS_KEY_ID"],
        "secretKey": state.secrets["AWS_SECRET_ACCESS_KEY"],
    }
    member = {
        "name": "member",
        "credentials": [credentials],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    write_private(folder / "s3.json", json.dumps({"identities": [member]}).encode())
