"""Everything about ranges of blocks that the search asks for again and again, as arrays.

Element [i, j] of a table belongs to a stage of blocks i to j - 1; element i of a vector to the cut
before block i (0 and the number of blocks: the two ends, where nothing crosses). Memory follows
`graph.cost.StageMemory`:

    memory = parameters + gradients + optimizer + held · kept + working

where `held` microbatches are in flight and each keeps what its operators save and what the stage
received and sent. A stage that recomputes keeps only what it received, and works on one whole
microbatch at a time:

    memory = parameters + gradients + optimizer + held · received + saved + sent + working

A tied parameter counts in every stage that reads it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion_dask.planner.records import ModelCost, Workload

__all__ = ["Tables"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """The tables of a model for one size of microbatch.

    Attributes:
        model: The model.
        merge: Microbatches of the model in one that is run.
        parameters: Trainable numbers of a range.
        state_bytes: Parameters and optimizer state of a range, what moves with it.
        gradient_bytes: Gradients of a range.
        fixed_bytes: Parameters, gradients and optimizer of a range.
        saved_bytes: What one microbatch keeps in a range, boundaries excluded.
        working_bytes: The most that a block of the range needs on top.
        activation_bytes: Forward bytes across each cut.
        return_bytes: Gradient bytes across each cut.
    """

    model: ModelCost
    merge: int
    parameters: Floats
    state_bytes: Floats
    gradient_bytes: Floats
    fixed_bytes: Floats
    saved_bytes: Floats
    working_bytes: Floats
    activation_bytes: Floats
    return_bytes: Floats

    @classmethod
    def of(cls, model: ModelCost, workload: Workload, merge: int = 1) -> "Tables":
        """Build them."""
        blocks = model.blocks
        parameters = _ranges([b.parameters for b in blocks])
        weights = _ranges([b.parameter_bytes for b in blocks])
        gradients = _ranges([b.gradient_bytes for b in blocks])
        for tied in model.tied:
            present = _ranges([float(i in tied.blocks) for i in range(len(blocks))]) > 0
            parameters += present * float(tied.parameters)
            weights += present * float(tied.parameter_bytes)
            gradients += present * float(tied.gradient_bytes)
        optimizer = parameters * workload.optimizer_bytes_per_parameter
        return cls(
            model=model,
            merge=merge,
            parameters=parameters,
            state_bytes=weights + optimizer,
            gradient_bytes=gradients,
            fixed_bytes=weights + gradients + optimizer,
            saved_bytes=_ranges([float(b.saved_bytes * merge) for b in blocks]),
            working_bytes=_largest([float(b.working_bytes * merge) for b in blocks]),
            activation_bytes=_cuts(model.boundary_bytes) * merge,
            return_bytes=_cuts(model.gradient_boundary_bytes) * merge,
        )

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.model.blocks)

    def kept(self) -> Floats:
        """What one microbatch in flight keeps in a range that does not recompute."""
        return self.saved_bytes + self.activation_bytes[:, None] + self.activation_bytes[None, :]

    def memory(self, held: int) -> Floats:
        """Peak memory of every range with so many microbatches in flight."""
        return self.fixed_bytes + held * self.kept() + self.working_bytes

    def memory_recomputing(self, held: int) -> Floats:
        """The same for stages that recompute."""
        received = self.activation_bytes[:, None]
        once = self.saved_bytes + self.activation_bytes[None, :] + self.working_bytes
        return self.fixed_bytes + held * received + once


def _ranges(values: list[int] | list[float]) -> Floats:
    total: Floats = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    between: Floats = total[None, :] - total[:, None]
    return between


def _largest(values: list[float]) -> Floats:
    found = np.zeros((len(values) + 1, len(values) + 1))
    for i in range(len(values)):
        found[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return found


def _cuts(values: tuple[int, ...]) -> Floats:
    return np.array([0.0, *values, 0.0])
