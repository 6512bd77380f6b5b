"""What S3 needs beyond plain fsspec: options, the conditional PUT, and the errors of its client.

Imported only when an s3 URL is opened, since botocore is slow to import. It relies on the portable subset of S3 only:
single PUT with `If-None-Match: *`, GET, LIST, DELETE. No If-Match, no conditional multipart upload:
servers differ there.
"""

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from fusion_storage.remote import Dialect

__all__ = ["dialect"]

# s3fs with its defaults answers `exists` and ranged reads from a stale listing, splits reads in
# ranges that can mix two versions, and shares instances across threads and forks.
_DEFAULTS: Mapping[str, Any] = {
    "use_listings_cache": False,
    "max_concurrency": 1,
    "skip_instance_cache": True,
}
_CONFIG: Mapping[str, Any] = {
    "max_pool_connections": 64,
    "connect_timeout": 5,
    "read_timeout": 30,
    "retries": {"mode": "legacy", "max_attempts": 8},
}
_LOST = ("PreconditionFailed", "ConditionalRequestConflict")
_LARGEST_SINGLE_PUT_BYTES = 5 * 2**30


def dialect(options: Mapping[str, Any]) -> Dialect:
    """Return how to talk to S3 with these storage options; explicit ones win over our defaults."""
    merged = {**_DEFAULTS, **options}
    merged["config_kwargs"] = {**_CONFIG, **merged.get("config_kwargs", {})}
    return Dialect(
        options=merged,
        errors=(OSError, BotoCoreError, ClientError),
        create=_create,
        is_place_missing=lambda error: _code(error) == "NoSuchBucket",
        has_folders=False,
    )


def _create(file_system: Any, path: str, data: bytes) -> bool:  # noqa: ANN401 - fsspec is untyped
    """PUT once if nothing is there; False means the server refused since something is."""
    try:
        file_system.pipe_file(path, data, mode="create", chunksize=_LARGEST_SINGLE_PUT_BYTES)
    except OSError as error:  # s3fs reports the 412 as "invalid argument"
        if isinstance(error, FileExistsError) or _code(error) in _LOST:
            return False
        raise
    return True


def _code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
