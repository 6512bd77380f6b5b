"""Questions to a scheduler from the command line: one connection a question.

Credentials come from Dask's configuration, which `Identity.as_environment` sets before Dask is imported.

Invariant: every question has a deadline.
"""

import asyncio
from typing import Any

from distributed import rpc
from distributed.security import Security

from fusion_dask.errors import ClusterError

__all__ = ["ask"]


def ask(address: str, operation: str, *, timeout_s: float = 3.0, **arguments: object) -> Any:  # noqa: ANN401 - JSON
    """Call a handler of the scheduler.

    Raises:
        ClusterError: It does not answer.
        SecurityError: It does not allow us to ask.
        ValueError: The address is malformed.
    """

    async def call() -> Any:  # noqa: ANN401 - JSON
        credentials = Security().get_connection_args("client")
        async with rpc(address, timeout=timeout_s, connection_args=credentials) as scheduler:
            return await getattr(scheduler, operation)(**arguments)

    try:
        return asyncio.run(asyncio.wait_for(call(), timeout_s))
    except (OSError, TimeoutError, MemoryError) as error:
        # MemoryError: another protocol answers, and its greeting reads as an enormous length.
        text = str(error) or "no answer in time"
        raise ClusterError(f"no Dask scheduler answers at {address}: {text}") from None
