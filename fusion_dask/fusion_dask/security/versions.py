"""Which versions work together.

Dask pickles its messages, and a stage has to give the same bits wherever it runs: Python's minor version
and the exact versions of this package, dask and distributed have to agree, torch and Prefect as far as
their minor version. Read from the installed packages' metadata: nothing is imported.

Invariant: what does not fit is refused with the line that fixes it.
"""

import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

__all__ = ["mismatch", "versions"]

EXACT: Final = ("fusion-dask", "dask", "distributed")
MINOR: Final = ("torch", "prefect")


def versions() -> dict[str, str]:
    """The versions of this installation; local suffixes such as `+cpu` are left out."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python} | {name: _public(version(name)) for name in (*EXACT, *MINOR)}


def mismatch(broker: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """What has to change here to work with the broker, in one sentence, or None.

    >>> pool = {"python": "3.11", "dask": "1.2.3", "torch": "2.8.0"}
    >>> mismatch(pool, {"python": "3.11", "dask": "1.2.3", "torch": "2.8.1"}) is None
    True
    >>> mismatch(pool, {"python": "3.11", "dask": "1.2.4", "torch": "2.7.0"})
    'this machine has dask 1.2.4, torch 2.7.0, the broker dask 1.2.3, torch 2.8.0: pip install "dask==1.2.3" "torch==2.8.*"'
    """
    if broker.get("python") != here.get("python"):
        return (
            f"this machine has Python {here.get('python')}, the broker {broker.get('python')}: "
            f"make an environment with Python {broker.get('python')} and install fusion-dask in it"
        )
    wrong = [
        name
        for name in (*EXACT, *MINOR)
        if name in broker and _relevant(name, broker[name]) != _relevant(name, here.get(name, ""))
    ]
    if not wrong:
        return None
    ours = ", ".join(f"{name} {here.get(name, 'missing')}" for name in wrong)
    theirs = ", ".join(f"{name} {broker[name]}" for name in wrong)
    fix = " ".join(f'"{name}=={_wanted(name, broker[name])}"' for name in wrong)
    return f"this machine has {ours}, the broker {theirs}: pip install {fix}"


def _public(text: str) -> str:
    return text.partition("+")[0]


def _relevant(name: str, text: str) -> str:
    return ".".join(text.split(".")[:2]) if name in MINOR else text


def _wanted(name: str, text: str) -> str:
    return f"{_relevant(name, text)}.*" if name in MINOR else text
