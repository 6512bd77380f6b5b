"""Where this process finds its cluster, its store and its home.

Covers: the three environment variables that the command line sets for the flow process and its
workers, and their defaults. Not covered: what is stored there, and Prefect's own settings.

Invariant: reading the settings has no side effect; nothing is created, nothing is connected to.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings", "current"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Addresses that every flow and task of this process shares.

    Attributes:
        cluster: Address of the Dask scheduler (`FUSION_CLUSTER`), or None outside of a cluster.
        store: URL or path of the store (`FUSION_STORE`), `<home>/store` by default.
        home: Folder for what outlives a run (`FUSION_HOME`).
    """

    cluster: str | None
    store: str
    home: Path


def current(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings of this process.

    An empty variable counts as unset.

    >>> current({"FUSION_HOME": "/data/fusion"}).store
    '/data/fusion/store'
    """
    home = Path(environ.get("FUSION_HOME") or _default_home(environ)).expanduser().absolute()
    return Settings(
        cluster=environ.get("FUSION_CLUSTER") or None,
        store=environ.get("FUSION_STORE") or str(home / "store"),
        home=home,
    )


def _default_home(environ: Mapping[str, str]) -> Path:
    data_home = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data_home) / "fusion"
