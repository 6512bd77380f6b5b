"""The records of a training run that its report is made of.

Covers what was measured: steps, validations and stages. Does not cover how they were measured (the
engine does) nor how they are shown (`report`). Invariant: records are immutable and hold plain
numbers, so that they travel, compare and serialise without surprises.
"""

from dataclasses import dataclass

__all__ = ["StageReport", "StepRecord", "TrainingHistory", "ValidationRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: Number of the step, the first is 1.
        loss: Mean loss of the global batch, in nats per token, before the update.
        grad_norm: Global norm of the gradient before clipping; None where nothing is clipped.
        learning_rate: Learning rate of this update.
        tokens: Tokens of the global batch of this step.
        seconds: Wall time from the end of the step before to the end of this one.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """The loss on held-out text, in nats per token, after `step` updates."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHistory:
    """What a run went through.

    Attributes:
        steps: One record a step, in order.
        validations: The evaluations, in order.
        unigram_entropy: Entropy of the token frequencies, in nats per token: the loss of a model
            that knows how often each token occurs and nothing else.
    """

    steps: tuple[StepRecord, ...]
    validations: tuple[ValidationRecord, ...]
    unigram_entropy: float

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(record.tokens for record in self.steps)

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return sum(record.seconds for record in self.steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of training, or None where no time was spent."""
        return self.tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """Where the time of one stage went.

    Attributes:
        stage: Number of the stage, the first is 0.
        worker: Name or address of the worker that held it.
        operators: Operators of its program.
        parameters: Elements of its parameters.
        busy_s: Time in forwards, backwards and updates.
        wait_s: Time blocked on a boundary tensor of a neighbour.
        wall_s: Time from its first to its last instruction.
        sent_bytes: Bytes of boundary tensors that its neighbours pulled.
    """

    stage: int
    worker: str
    operators: int
    parameters: int
    busy_s: float
    wait_s: float
    wall_s: float
    sent_bytes: int

    @property
    def busy_share(self) -> float | None:
        """Part of the wall time that was computation, or None without wall time."""
        return min(self.busy_s / self.wall_s, 1.0) if self.wall_s > 0 else None

    @property
    def bubble_share(self) -> float | None:
        """Part of the wall time in which the device did not compute, whatever the cause."""
        return None if self.busy_share is None else 1.0 - self.busy_share
