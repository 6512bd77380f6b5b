"""The errors of the engine.

    FusionError                 every error that a person can act on
    ├── CaptureError            a model that cannot become a graph
    ├── ProgramError            a stage program or graph file that is malformed, too large or not allowed
    ├── WeightsError            a checkpoint file that lacks what the model needs, or is damaged
    ├── PlanError               nothing that was offered can hold or run the model
    ├── StageError              a stage could not go on
    │   ├── StageLost           the worker that held a stage went away
    │   └── NeighbourFailed     another stage of the run failed or the run was stopped
    ├── ExchangeTimeout         a boundary tensor did not arrive before its deadline
    ├── ProfileError            a worker's profile that is incomplete or impossible
    ├── DeviceError             a device that does not exist or cannot be used as asked
    ├── SecurityError           an identity, certificate or token that cannot be used
    │   ├── TokenRefused        the broker does not accept a token: unknown, expired, revoked, used up
    │   └── EnrolmentError      the broker could not be asked, or is not the one that the token names
    └── ClusterError            the Dask cluster cannot be reached or is not a Fusion cluster
        └── VersionMismatch     this machine runs other versions than the broker

An error carries its data and the next action for the person, and survives pickling: every
constructor takes exactly the arguments that `Exception.args` keeps. The storage package sits below
this one and has a tree of its own (`fusion_storage.errors`).
"""

__all__ = [
    "CaptureError",
    "ClusterError",
    "DeviceError",
    "EnrolmentError",
    "ExchangeTimeout",
    "FusionError",
    "NeighbourFailed",
    "PlanError",
    "ProfileError",
    "ProgramError",
    "SecurityError",
    "StageError",
    "StageLost",
    "TokenRefused",
    "VersionMismatch",
    "WeightsError",
]


class FusionError(Exception):
    """An error of the world, worded for the person who has to act on it."""


class CaptureError(FusionError):
    """The model cannot be captured as a graph."""


class ProgramError(FusionError):
    """A serialised graph or stage program is not acceptable; nothing of it was executed."""


class WeightsError(FusionError):
    """The weights of a checkpoint cannot be used for this model."""


class PlanError(FusionError):
    """No plan satisfies what was asked."""


class ClusterError(FusionError):
    """The cluster cannot be used."""


class VersionMismatch(ClusterError):
    """This machine and the broker run versions that do not work together."""


class ProfileError(FusionError):
    """A profile is incomplete or impossible."""


class DeviceError(FusionError):
    """A device does not exist or cannot be used as asked."""


class SecurityError(FusionError):
    """An identity, certificate or token cannot be used."""


class TokenRefused(SecurityError):
    """The broker does not accept a token."""


class EnrolmentError(SecurityError):
    """The broker cannot be asked, or is not the one that the token names."""


class StageError(FusionError):
    """A stage could not go on."""

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(stage, reason)
        self.stage = stage
        self.reason = reason

    def __str__(self) -> str:
        """For people."""
        return f"stage {self.stage}: {self.reason}"


class StageLost(StageError):
    """The worker that held a stage left the cluster."""


class NeighbourFailed(StageError):
    """Another stage of the run failed, or the run was stopped; `stage` says which."""


class ExchangeTimeout(FusionError):
    """A boundary tensor did not arrive in time."""

    def __init__(self, tensor: str, timeout_s: float) -> None:
        super().__init__(tensor, timeout_s)
        self.tensor = tensor
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.tensor} did not arrive within {self.timeout_s:g} s: its stage is stuck or its "
            "worker is unreachable; see the log of that worker"
        )
