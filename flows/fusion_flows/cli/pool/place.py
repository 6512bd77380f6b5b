"""The broker's folder, and who runs a broker in it.

Invariant: one supervisor at a time; the lock is the kernel's and ends with the process that holds it.
"""

import contextlib
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusion_dask.security.authority import Authority
from fusion_flows.cli.errors import InputError, StartError

__all__ = ["BrokerPlace"]

POLL_S: Final = 0.05
#: Whoever only looks holds the lock for a moment too.
CLAIM_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPlace:
    """The files of a broker below a home."""

    home: Path

    @property
    def folder(self) -> Path:
        """Everything that the broker keeps."""
        return self.home / "broker"

    @property
    def authority(self) -> Path:
        """Key and certificate of the authority."""
        return self.folder / "authority"

    @property
    def tokens(self) -> Path:
        """The token book."""
        return self.folder / "tokens.json"

    @property
    def join_token(self) -> Path:
        """The token that `fusion up` prints."""
        return self.folder / "join-token"

    @property
    def logs(self) -> Path:
        """What the services say."""
        return self.folder / "logs"

    def open_authority(self, *, is_new: bool) -> Authority:
        """The pool's authority; one is made for a new pool only, since every member trusts the old one.

        Raises:
            InputError: It is gone.
            SecurityError: It is damaged.
        """
        if not is_new and not (self.authority / "ca.pem").exists():
            raise InputError(
                f"the authority of this pool, {self.authority}, is gone: put its backup back, or make a "
                "new pool in another FUSION_HOME"
            )
        return Authority.open(self.authority)

    def claim(self) -> int:
        """Become the supervisor: the lock, to be kept open.

        Raises:
            InputError: Another one is running.
        """
        lock = os.open(self.folder / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + CLAIM_S
        while not _lock(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(lock)
                raise InputError(f"a broker runs in {self.folder} already; see fusion status")
            time.sleep(POLL_S)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock

    def supervisor(self) -> int | None:
        """The process id of the supervisor that runs, or None.

        Raises:
            InputError: The home is somebody else's.
        """
        path = self.folder / "supervisor.lock"
        try:
            lock = os.open(path, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(
                f"{path} cannot be opened ({error.strerror}); set FUSION_HOME to a folder of yours"
            ) from None
        with contextlib.closing(os.fdopen(lock, "r+")) as file:
            if _lock(file.fileno(), fcntl.LOCK_SH):
                return None
            text = file.read().strip()
            return int(text) if text.isdigit() else None

    def end_supervisor(self, timeout_s: float) -> bool:
        """End the supervisor and wait until it is gone; False if none was running.

        Raises:
            InputError: The home is somebody else's.
            StartError: It does not end.
        """
        pid = self.supervisor()
        if pid is None:
            return False
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        while self.supervisor() is not None:
            if time.monotonic() > deadline:
                raise StartError(
                    f"the broker's supervisor (process {pid}) does not end; see {self.logs}, or end it "
                    f"with kill -9 {pid}"
                )
            time.sleep(POLL_S)
        return True


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
