"""Run stage programs one after the other in this process, on the torch plane.

What a pipeline does without its transport: boundary tensors go forward, gradients come back, and
gradients of parameters that several stages hold are summed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_dask.graph.ir import StageProgram
from fusion_dask.planes.base import RandomKey
from fusion_dask.planes.torch_plane import TorchPlane

__all__ = ["Result", "run_stages"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Result:
    """Outputs by role, gradients by parameter, buffers after the step."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run_stages(
    programs: Sequence[StageProgram],
    state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    backward: bool = True,
) -> Result:
    planes = [
        TorchPlane(
            program,
            {p.name: state[p.name].clone() for p in program.parameters},
            {b.name: state[b.name].clone() for b in program.buffers},
            device=CPU,
        )
        for program in programs
    ]
    key = RandomKey(seed=1, step=0, microbatch=0)
    sent: dict[tuple[int, str], Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for plane in planes:
        program = plane.program
        received = {
            v.name: sent[port.stage, v.name] for port in program.receives for v in port.values
        }
        inputs = {v.name: batch[v.name] for v in program.inputs}
        done = plane.forward(inputs, received, key, keep=backward)
        sent |= {(program.index, name): tensor for name, tensor in done.sends.items()}
        outputs |= done.outputs
    gradients = _backward(planes) if backward else {}
    buffers = {name: b for plane in planes for name, b in plane.buffers().items()}
    return Result(outputs, gradients, buffers)


def _backward(planes: Sequence[TorchPlane]) -> dict[str, Tensor]:
    returned: dict[str, Tensor] = {}
    for plane in reversed(planes):
        wanted = {v.name for port in plane.program.sends for v in port.values if v.grad}
        back = plane.backward(0, {n: returned[n] for n in wanted}, 1.0)
        declared = {v.name for port in plane.program.receives for v in port.values if v.grad}
        assert set(back) == declared
        for name, tensor in back.items():
            returned[name] = returned[name] + tensor if name in returned else tensor
    gradients: dict[str, Tensor] = {}
    for plane in planes:
        for name, parameter in plane.parameters().items():
            if parameter.grad is not None:
                known = gradients.get(name)
                gradients[name] = parameter.grad if known is None else known + parameter.grad
    return gradients
