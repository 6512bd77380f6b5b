"""What `fusion up` remembers of its pool: addresses, ports and the secrets of its services.

Covers: one private JSON file in the broker's folder. Not covered: keys and tokens, which have files of
their own.

Invariant: a pool keeps its ports and secrets for as long as its folder exists.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fusion_dask.errors import SecurityError
from fusion_dask.security.files import write_private

__all__ = ["BrokerState", "Ports", "load_state", "save_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The TCP ports of a pool; `store` is None when the store is not the pool's own."""

    gateway: int
    scheduler: int
    prefect: int
    store: int | None
    dashboard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """A pool as its broker knows it.

    Attributes:
        host: The address to listen on.
        addresses: Names and IP addresses by which members may reach the broker, the best first.
        ports: Its ports.
        store: URL of the store.
        secrets: Environment variables that every member needs, such as `PREFECT_API_AUTH_STRING`.
    """

    host: str
    addresses: tuple[str, ...]
    ports: Ports
    store: str
    secrets: Mapping[str, str] = field(repr=False)


def save_state(folder: Path, state: BrokerState) -> None:
    """Write `state.json`."""
    write_private(folder / "state.json", json.dumps(asdict(state), indent=1).encode())


def load_state(folder: Path) -> BrokerState | None:
    """Read `state.json`; None if there was never a pool.

    Raises:
        SecurityError: It is damaged, or somebody else's.
    """
    path = folder / "state.json"
    try:
        plain = json.loads(path.read_text())
        state = BrokerState(
            host=plain["host"],
            addresses=tuple(plain["addresses"]),
            ports=Ports(**plain["ports"]),
            store=plain["store"],
            secrets=dict(plain["secrets"]),
        )
        _check(state)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SecurityError(
            f"{path} cannot be read ({error.strerror}); set FUSION_HOME to a folder of yours"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SecurityError(
            f"{path} is damaged ({error}); put its backup back, or make a new pool in another FUSION_HOME"
        ) from None
    return state


def _check(state: BrokerState) -> None:
    """Raise TypeError or ValueError for what somebody wrote into the file by hand."""
    if not state.addresses:
        raise ValueError("no addresses")
    if "PREFECT_API_AUTH_STRING" not in state.secrets:
        raise ValueError("no PREFECT_API_AUTH_STRING")
    for text in (state.host, state.store, *state.addresses, *state.secrets.values()):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a text")
    for name, port in asdict(state.ports).items():
        is_none = name == "store" and port is None
        if not is_none and not (isinstance(port, int) and 0 < port < 65536):
            raise ValueError(f"{port!r} is not a port")
