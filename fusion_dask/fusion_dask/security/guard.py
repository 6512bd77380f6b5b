"""The guard on a Dask server: which role may call which operation.

Dask's TLS lets in whoever has a certificate of the pool, and whoever is in may do everything. The guard
looks at the certificate of each connection: a provider offers a worker and does not submit work, a user
submits work and is no worker, and a certificate that was taken back opens nothing.

Covers: the operations of a scheduler and of a worker, by name. Streams need no guard of their own: each
begins with `register-client` or `register-worker`, and Dask adds `worker=` to all that comes over a
worker's, which no handler meant for clients takes. Connections without TLS (an embedded cluster on the
loopback) are left alone.

Not covered: what a member can do with a protocol of his own making. Dask's messages carry pickles, so a
member who writes such a client could still run code on the machines that he reaches: membership is trust,
and the guard is against what Dask's own tools allow. Refusing before unpickling is not possible from
here: the `deserializers` of a connection govern `Serialized` parts only, those marked `Pickled` are
unpickled while the message is decoded, before anybody has seen its operation. Nor does the guard look at
arguments: a provider may report a profile or a heartbeat in another's name.

Invariant: an operation that is added to the server later is guarded too.
"""

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from distributed.core import Server, Status, error_message

from fusion_dask.errors import SecurityError
from fusion_dask.security.roles import Role, role_of, serial_of

__all__ = [
    "PROVIDER_AT_SCHEDULER",
    "PROVIDER_AT_WORKER",
    "Refused",
    "guard",
    "scheduler_allows",
    "worker_allows",
]

logger = logging.getLogger(__name__)

#: What a worker needs of the scheduler: to join, to live, to leave, to be measured, to find
#: neighbours; and the primitives that tasks coordinate with.
PROVIDER_AT_SCHEDULER: Final = frozenset(
    {
        "identity",
        "register-worker",
        "heartbeat_worker",
        "who_has",
        "fusion_hello",
        "fusion_profile",
        "fusion_drain",
        "fusion_where",
        "fusion_workers",
        "fusion_status",
        "fusion_echo",
        "semaphore_register",
        "semaphore_acquire",
        "semaphore_release",
        "semaphore_refresh_leases",
        "semaphore_close",
        "semaphore_value",
        "event_wait",
        "event_set",
        "event_clear",
        "event_is_set",
        "shuffle_get",
        "shuffle_get_or_create",
        "shuffle_barrier",
        "shuffle_restrict_task",
    }
)
#: What is a worker's alone.
WORKER_ONLY: Final = frozenset(
    {"register-worker", "heartbeat_worker", "fusion_hello", "fusion_profile"}
)
#: What neighbours need of a worker: results, boundary tensors, measurements.
PROVIDER_AT_WORKER: Final = frozenset(
    {
        "identity",
        "get_data",
        "ping",
        "fusion_pull",
        "fusion_echo",
        "shuffle_receive",
    }
)


class Refused(SecurityError, ImportError):
    """The guard does not let this certificate call this operation.

    An ImportError, since that is what makes Dask's client close itself: after an OSError it tries again,
    after anything else it is left half open and its own `close` fails.
    """


def scheduler_allows(role: Role | None, operation: str) -> bool:
    """Whether a role may call an operation of the scheduler."""
    if role is Role.PROVIDER:
        return operation in PROVIDER_AT_SCHEDULER
    if role is Role.USER:
        return operation not in WORKER_ONLY
    return role is Role.BROKER


def worker_allows(role: Role | None, operation: str) -> bool:
    """Whether a role may call an operation of a worker."""
    if role is Role.PROVIDER:
        return operation in PROVIDER_AT_WORKER
    return role in {Role.BROKER, Role.USER}


def guard(
    server: Server,
    allows: Callable[[Role | None, str], bool],
    revoked: Callable[[], frozenset[str]] = frozenset,
) -> None:
    """Put the guard in front of every operation of a server.

    Args:
        server: A scheduler or a worker, before or after it starts.
        allows: Whether a role may call an operation.
        revoked: Serials of certificates that open nothing.
    """
    server.handlers = _Guarded(server.handlers, allows, revoked)


class _Guarded(dict[str, Callable[..., Any]]):
    """The handlers of a server; what is taken out by name is guarded."""

    def __init__(
        self,
        handlers: Mapping[str, Callable[..., Any]],
        allows: Callable[[Role | None, str], bool],
        revoked: Callable[[], frozenset[str]],
    ) -> None:
        super().__init__(handlers)
        self._allows = allows
        self._revoked = revoked
        # Dask keeps what it learns about a handler for ever, so each is wrapped only once.
        self._wrapped: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The guarded handler of an operation."""
        handler = super().__getitem__(operation)
        known = self._wrapped.get(operation)
        if known is None or known[0] is not handler:
            known = self._wrapped[operation] = (handler, self._wrap(operation, handler))
        return known[1]

    def _wrap(self, operation: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(handler).parameters.values())
        takes_comm = bool(parameters) and parameters[0].name == "comm"

        async def guarded(comm: Any, **message: Any) -> Any:  # noqa: ANN401 - Dask's own types
            reason = self._reason(comm, operation)
            if reason is not None:
                logger.warning("%s from %s: %s", operation, comm.peer_address, reason)
                return await _refuse(comm, operation, reason)
            result = handler(comm, **message) if takes_comm else handler(**message)
            return await result if inspect.isawaitable(result) else result

        guarded.__name__ = getattr(handler, "__name__", operation)
        # Dask asks whether a handler takes `comm`, first, and `serializers`.
        comm = inspect.Parameter("comm", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        guarded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [comm, *parameters[takes_comm:]]
        )
        return guarded

    def _reason(self, comm: Any, operation: str) -> str | None:  # noqa: ANN401 - Dask's own types
        certificate = comm.extra_info.get("peercert")
        if certificate is None:
            return None
        if serial_of(certificate) in self._revoked():
            return "refused: the token of this certificate was revoked; ask for a new one"
        role = role_of(certificate)
        if not self._allows(role, operation):
            return (
                f"refused: a certificate for the role {role or 'none'} does not allow {operation}"
            )
        return None


async def _refuse(comm: Any, operation: str, reason: str) -> object:  # noqa: ANN401 - Dask's types
    """Answer so that the caller's Dask reports the reason."""
    # Those who register ask for no reply, and wait for the first message of their stream.
    if operation == "register-client":
        await comm.write([{"op": "stream-start", "error": reason}])
        return Status.dont_reply
    if operation == "register-worker":
        await comm.write({"status": "error", "message": reason, "time": time.time()})
        return Status.dont_reply
    # Raised here, Dask would log a traceback of this module for each.
    return error_message(Refused(reason), status="uncaught-error")
