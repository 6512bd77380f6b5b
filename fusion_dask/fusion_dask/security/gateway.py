"""The gateway: where a machine with a token becomes a member. HTTPS through uvicorn.

    GET  /ca        the authority's certificate; a joiner compares it with its token before it says more
    GET  /health    time and versions of the broker
    POST /enrol     token and certificate request -> certificate, ports, secrets

Run by `fusion up`:  python -P -m fusion_dask.security.gateway FOLDER

Covers: the three answers. Not covered: what the broker's other services do with a certificate.

Invariant: a secret leaves only in answer to a valid token; no request makes the gateway keep anything
but one more serial in the token book, and its log has no secret and no line that a joiner wrote.
"""

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fusion_dask.errors import FusionError, SecurityError, TokenRefused
from fusion_dask.security.authority import Authority
from fusion_dask.security.state import BrokerState, load_state
from fusion_dask.security.tokens import Token, TokenBook, TokenRecord
from fusion_dask.security.versions import mismatch, versions

__all__ = ["create_app", "main"]

MEMBER_DAYS: Final = 30.0
BODY_BYTES: Final = 64 * 1024
HEADER_BYTES: Final = 16 * 1024
#: Longest time that a request may take to arrive.
BODY_S: Final = 10.0
IDLE_S: Final = 5
CONNECTIONS: Final = 200
#: What the broker takes for the name of a provider.
NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
VERSION: Final = re.compile(r"[A-Za-z0-9.+!_-]{1,40}")

logger = logging.getLogger(__name__)


class _Refused(Exception):
    """An answer that is not 200.

    Args:
        status: HTTP status.
        kind: For the program of the joiner.
        message: For the person.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(status, kind, message)
        self.status = status
        self.kind = kind
        self.message = message


def create_app(
    authority: Authority,
    book: TokenBook,
    state: BrokerState,
    clock: Callable[[], float] = time.time,
) -> Starlette:
    """The gateway of a pool as an ASGI application."""
    here = versions()

    async def ca(_: Request) -> Response:
        return PlainTextResponse(authority.certificate_pem)

    async def health(_: Request) -> Response:
        return JSONResponse({"time": clock(), "versions": here})

    async def enrol(request: Request) -> Response:
        wanted = _parse(await _body(request))
        reason = mismatch(here, wanted["versions"])
        if reason is not None:
            raise _Refused(409, "versions", reason)
        answer = await run_in_threadpool(_enrol, wanted)
        return JSONResponse(answer)

    def _enrol(wanted: Mapping[str, Any]) -> dict[str, Any]:
        token = Token.parse(wanted["token"])
        issued = []

        def issue(record: TokenRecord) -> str:
            issued.append(
                authority.sign(
                    wanted["csr"].encode(), role=record.role, name=wanted["name"], days=MEMBER_DAYS
                )
            )
            return issued[0].serial

        record = book.redeem(token, issue, now=clock())
        logger.info("%s %r joined with token %s", record.role, wanted["name"], token.id)
        return {
            "certificate": issued[0].certificate_pem.decode(),
            "expires": issued[0].expires,
            "role": record.role.value,
            "ports": asdict(state.ports),
            "store": state.store,
            "secrets": dict(state.secrets),
        }

    app = Starlette(
        routes=[
            Route("/ca", ca),
            Route("/health", health),
            Route("/enrol", enrol, methods=["POST"]),
        ]
    )
    app.add_exception_handler(_Refused, _say_no)
    app.add_exception_handler(TokenRefused, _say_no)
    app.add_exception_handler(SecurityError, _say_no)
    return app


async def _say_no(request: Request, error: Exception) -> Response:
    if isinstance(error, TokenRefused):
        error = _Refused(403, "token", str(error))
    elif not isinstance(error, _Refused):
        error = _Refused(400, "request", str(error))
    logger.warning("%s refused: %s", request.client and request.client.host, error.message)
    body = {"error": error.kind, "message": error.message}
    return JSONResponse(body, status_code=error.status)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES:
                    raise _Refused(413, "request", f"a request has at most {BODY_BYTES} bytes")
    except TimeoutError:
        raise _Refused(408, "request", f"a request arrives within {BODY_S:g} s") from None
    return bytes(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        wanted = json.loads(body)
    except (ValueError, RecursionError):
        raise _Refused(400, "request", "the request is not JSON") from None
    fields = {"token": str, "csr": str, "name": str, "versions": dict}
    if not isinstance(wanted, dict) or set(wanted) != set(fields):
        raise _Refused(400, "request", f"a request has the fields {', '.join(sorted(fields))}")
    for name, kind in fields.items():
        if not isinstance(wanted[name], kind):
            raise _Refused(400, "request", f"{name} is not of the type {kind.__name__}")
    if not NAME.fullmatch(wanted["name"]):
        raise _Refused(
            400,
            "request",
            "a name has 1 to 100 letters, digits, dots, dashes and underscores, and does not begin "
            "with a dot",
        )
    # Answers and the log repeat them.
    if not all(
        isinstance(text, str) and VERSION.fullmatch(text) for text in wanted["versions"].values()
    ):
        raise _Refused(400, "request", "versions has something that is not a version")
    if not wanted["csr"].isascii():
        raise _Refused(400, "request", "csr is not in the PEM form")
    return wanted


def main(folder: Path) -> None:
    """Serve the gateway of the pool in `folder` until SIGTERM.

    Raises:
        SecurityError: There is no pool in that folder.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    state = load_state(folder)
    if state is None:
        raise SecurityError(f"there is no pool in {folder}; `fusion up` makes one")
    authority = Authority.open(folder / "authority")
    certificate, key = authority.server_files(folder, state.addresses)
    uvicorn.run(
        create_app(authority, TokenBook(folder / "tokens.json"), state),
        host=state.host,
        port=state.ports.gateway,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        # The one that has a limit for headers.
        http="h11",
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        limit_concurrency=CONNECTIONS,
    )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except FusionError as error:
        sys.exit(f"error: {error}")
