"""The checks of `fusion doctor`, one function each.

Covers: this machine, and the pool that it belongs to, asked as a member. Not covered: repairing.

Invariant: a check that cannot be made is a finding, not a crash; none changes anything but one object in
the store, which it removes again.
"""

import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import psutil  # type: ignore[import-untyped]

from fusion_dask.devices.find import cpu_device, find_gpus
from fusion_dask.errors import FusionError
from fusion_dask.security.enrol import ask_health
from fusion_dask.security.identity import Identity
from fusion_dask.security.versions import mismatch, versions
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.membership import as_member, known_pool
from fusion_flows.cli.pool.health import checks
from fusion_flows.cli.pool.place import BrokerPlace
from fusion_storage.errors import StorageError
from fusion_storage.store import open_store
from fusion_tasks import settings

__all__ = ["Finding", "checkup"]

SKEW_S: Final = 5.0
DISK_BYTES: Final = 10 * 10**9
EXPIRES_S: Final = 3 * 86400.0
PORT_OPTIONS: Final = {
    "gateway": "--port",
    "scheduler": "--scheduler-port",
    "prefect": "--prefect-port",
    "store": "--store-port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check: `text` says what is, and what to do if it is not well."""

    check: str
    state: Literal["ok", "warn", "fail"]
    text: str


def checkup(cluster: str | None) -> list[Finding]:
    """All checks: of this machine, then of the pool, if there is one.

    Args:
        cluster: The gateway of the pool; the one of this home by default.
    """
    home = settings.current().home
    findings = [_versions(), *_devices(), _disk(home), _broker(home)]
    try:
        identity = known_pool(home, cluster)
        os.environ.update(as_member(identity))
    except InputError as error:
        return [*findings, Finding(check="pool", state="warn", text=str(error))]
    except FusionError as error:
        return [*findings, Finding(check="pool", state="fail", text=str(error))]
    findings.append(_certificate(identity))
    findings += _services(identity)
    if any(f.check == "gateway" and f.state == "ok" for f in findings):
        findings += _health(identity)
    return [*findings, _store(identity)]


def _versions() -> Finding:
    here = versions()
    text = ", ".join(f"{name} {version}" for name, version in here.items())
    return Finding(check="versions", state="ok", text=text)


def _devices() -> list[Finding]:
    gpus = find_gpus()
    if not gpus:
        cpu = cpu_device()
        text = (
            f"no GPU; {cpu.name} computes. With a GPU: is its driver loaded (nvidia-smi, rocminfo)?"
        )
        return [Finding(check="device", state="ok", text=text)]
    usable = _usable_gpus()
    findings = [
        Finding(
            check="device",
            state="ok",
            text=f"gpu{gpu.index} {gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB, {gpu.id}",
        )
        for gpu in gpus
    ]
    if usable < len(gpus):
        text = (
            f"torch can use {usable} of {len(gpus)} GPUs: install the build of torch that fits their "
            "driver (https://pytorch.org/get-started)"
        )
        findings.append(Finding(check="driver", state="fail", text=text))
    return findings


def _usable_gpus() -> int:
    # Takes seconds to import, and only matters where there is a GPU.
    import torch

    return torch.cuda.device_count() + int(torch.backends.mps.is_available())


def _disk(home: Path) -> Finding:
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        text = f"{nearest} cannot be written: set FUSION_HOME to a folder of yours"
        return Finding(check="disk", state="fail", text=text)
    free = shutil.disk_usage(nearest).free
    text = f"{free / 1e9:.0f} GB free for {home}"
    if free < DISK_BYTES:
        text += "; checkpoints and databases need some 10 GB: make room, or set FUSION_HOME"
        return Finding(check="disk", state="warn", text=text)
    return Finding(check="disk", state="ok", text=text)


def _broker(home: Path) -> Finding:
    pid = BrokerPlace(home=home).supervisor()
    if pid is None:
        return Finding(check="broker", state="ok", text="none runs on this machine in this home")
    since = time.time() - psutil.Process(pid).create_time()
    text = f"runs here, process {pid}, for {since / 60:.0f} min"
    return Finding(check="broker", state="ok", text=text)


def _certificate(identity: Identity) -> Finding:
    left_s = identity.expires - time.time()
    text = f"{identity.role} {identity.name} of {identity.address}, for {left_s / 86400:.0f} days"
    if left_s < EXPIRES_S:
        text += "; join again with a new token before it ends"
        return Finding(check="certificate", state="warn", text=text)
    return Finding(check="certificate", state="ok", text=text)


def _services(identity: Identity) -> list[Finding]:
    findings = []
    for name, answers in checks(identity).items():
        if answers():
            findings.append(Finding(check=name, state="ok", text="answers over TLS"))
            continue
        text = (
            f"does not answer at {identity.host}: is `fusion up` running there (its logs say more), and "
            f"does a firewall let its port through (fusion up {PORT_OPTIONS[name]})?"
        )
        findings.append(Finding(check=name, state="fail", text=text))
    return findings


def _health(identity: Identity) -> list[Finding]:
    try:
        health, behind_s = ask_health(identity)
    except FusionError as error:
        return [Finding(check="gateway", state="fail", text=str(error))]
    return [_clock(behind_s), _same_versions(health)]


def _clock(behind_s: float) -> Finding:
    text = f"{abs(behind_s):.1f} s {'behind' if behind_s > 0 else 'before'} the broker's"
    if abs(behind_s) > SKEW_S:
        text += "; set it (timedatectl set-ntp true): certificates and S3 signatures depend on it"
        return Finding(check="clock", state="fail", text=text)
    return Finding(check="clock", state="ok", text=text)


def _same_versions(health: Mapping[str, Any]) -> Finding:
    reason = mismatch(health["versions"], versions())
    if reason is not None:
        return Finding(check="versions", state="fail", text=reason)
    return Finding(check="versions", state="ok", text="work with the broker's")


def _store(identity: Identity) -> Finding:
    key, data = f"doctor/{uuid.uuid4().hex}", b"fusion"
    try:
        store = open_store(identity.store)
        store.create(key, data)
        try:
            is_same = store.read(key) == data
        finally:
            store.delete(key)
    except (StorageError, OSError, ValueError) as error:
        text = f"{identity.store}: {error}"
        return Finding(check="store", state="fail", text=" ".join(text.split()))
    if not is_same:
        text = f"{identity.store} returns something else than was put there"
        return Finding(check="store", state="fail", text=text)
    return Finding(check="store", state="ok", text=f"{identity.store} can be written and read")
