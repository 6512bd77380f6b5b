"""What went wrong in a capture, in the words of the model's own source lines.

Covers: finding the line of the model in a traceback or in the recorded stack of a graph node, and
wording what the person can do. Does not capture anything itself.
"""

import os
import re
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fusion_dask.errors import CaptureError

__all__ = ["explain", "frame_of", "short_source", "user_frame"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)')

_DATA_DEPENDENT = (
    "here the values of a tensor decide which code runs or how large a tensor is. Choose with "
    "torch.where or torch.cond instead of a Python branch, and keep sizes fixed (a mask instead of "
    "a selection)"
)
_FALLBACK = "write that line with torch operators on the module's own tensors"


def user_frame(stack_trace: str | None) -> tuple[str, int, str] | None:
    """File, line and code of the innermost frame of a recorded stack that is not torch's own."""
    frames = [
        (file, int(line), code.strip())
        for file, line, code in _FRAME.findall(stack_trace or "")
        if not file.startswith((_TORCH, _HERE, "<"))
    ]
    return frames[-1] if frames else None


def short_source(stack_trace: str | None) -> str:
    """`folder/file.py:line` of a recorded stack: the same on every machine; empty if unknown."""
    frame = user_frame(stack_trace)
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame[0]).parts[-2:])}:{frame[1]}"


def frame_of(node: torch.fx.Node | None) -> str:
    """Where a node comes from, for a message."""
    frame = user_frame(node.meta.get("stack_trace")) if node is not None else None
    return f"{frame[0]}:{frame[1]} `{frame[2]}`" if frame else "an unknown line of the model"


def explain(module: nn.Module, error: Exception) -> CaptureError:
    """The error that a person gets for an exception inside `torch.export`."""
    if isinstance(error, CaptureError):
        return error
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((_TORCH, _HERE, "<"))
    ]
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    where = "in its forward"
    if frames:
        where = f"at {frames[-1].filename}:{frames[-1].lineno} `{(frames[-1].line or '').strip()}`"
    elif (recorded := user_frame(str(error))) is not None:
        where = f"at {recorded[0]}:{recorded[1]} `{recorded[2]}`"
    advice = _DATA_DEPENDENT if _is_data_dependent(error) else _FALLBACK
    return CaptureError(
        f"{type(module).__name__} cannot be captured {where}: {advice} ({reason[:300]})"
    )


def _is_data_dependent(error: Exception) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GuardOnDataDependentSymNode) or "data-dependent" in str(seen).lower():
            return True
        seen = seen.__cause__ or seen.__context__
    return False
