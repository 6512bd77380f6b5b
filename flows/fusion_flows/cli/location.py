"""What a TARGET on the command line names, as far as that shows without loading it.

Covers: built-in procedures by name, and `file.py` or `file.py:name`. Not covered: loading
(`targets.py`), which imports Prefect and takes seconds; a wrong name is answered at once.

Invariant: a target that is neither is an InputError that lists what there is.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fusion_flows.cli.errors import InputError

__all__ = ["BUILT_IN", "Location", "locate"]

# Name of the procedure -> module; its flow carries the same name.
BUILT_IN: Final = MappingProxyType({"pretrain": "fusion_flows.pretrain"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a flow is: a procedure of ours (`module`), or a file with an optional flow name."""

    text: str
    module: str | None = None
    path: Path | None = None
    flow_name: str | None = None


def locate(text: str) -> Location:
    """Find the module or file that `text` names.

    Raises:
        InputError: There is no such procedure or file.
    """
    if text in BUILT_IN:
        return Location(text=text, module=BUILT_IN[text], flow_name=text)
    file_name, _, flow_name = text.partition(":")
    path = Path(file_name).expanduser()
    if path.suffix != ".py":
        close = get_close_matches(text, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"there is no procedure named {text}; {hint}{_usage()}")
    if not path.is_file():
        raise InputError(f"there is no file {file_name}; {_usage()}")
    return Location(text=file_name, path=path.resolve(), flow_name=flow_name or None)


def _usage() -> str:
    return (
        f"TARGET is one of {', '.join(sorted(BUILT_IN))}, or a file: my/flow.py or my/flow.py:name"
    )
