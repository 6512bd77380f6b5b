"""The record of a run, and its blobs: tokenizer, plan, stage programs.

    runs/<run>/run.json                     the record, written once
    runs/<run>/blobs/names/<name>.json      size and SHA-256 of a blob, written last
    runs/<run>/blobs/data/<sha256>          its bytes

Invariant: a record or blob never changes once written, and is verified whenever it is read.
"""

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any

from fusion_storage.errors import CommitConflict, IntegrityError, NotFound
from fusion_storage.names import BLOB_NAME, RUN_NAME, check_name
from fusion_storage.sealed import JSON, seal, unseal
from fusion_storage.store import Store
from fusion_storage.verified import verify

__all__ = ["create_run", "get_blob", "list_blobs", "list_runs", "put_blob", "read_run"]

_RECORD = "run.json"
_POINTER_SUFFIX = ".json"


def create_run(store: Store, run: str, record: Mapping[str, JSON]) -> None:
    """Start a run under a name that is free.

    Raises:
        CommitConflict: a run of this name exists, with an equal record or not.
    """
    # The id makes equal records of two callers different, so that only one of them wins.
    sealed = seal({"run": run, "creation": uuid.uuid4().hex, "record": record})
    if not store.create(_run_key(run), sealed):
        raise CommitConflict(f"run {run}", "resume it, or choose another name")


def read_run(store: Store, run: str) -> dict[str, Any]:
    """Return the record of a run.

    Raises:
        NotFound: there is no such run; lists those that there are.
        IntegrityError: the record is damaged.
    """
    key = _run_key(run)
    data = store.read(key)
    if data is None:
        raise NotFound(f"run {run}", store.url, list_runs(store))
    sealed = unseal(data, key)
    if sealed.get("run") != run or not isinstance(sealed.get("record"), dict):
        raise IntegrityError(key, f"it is the record of {sealed.get('run')!r}")
    return dict(sealed["record"])


def list_runs(store: Store) -> list[str]:
    """Return the names of all runs, sorted."""
    names = [name for name in store.children("runs") if RUN_NAME.fullmatch(name)]
    return [name for name in names if store.read(_run_key(name)) is not None]


def put_blob(store: Store, run: str, name: str, data: bytes) -> None:
    """Keep some bytes with a run; the same bytes again are no error.

    Raises:
        CommitConflict: the run holds other bytes under this name.
    """
    key = _pointer_key(run, name)
    digest = hashlib.sha256(data).hexdigest()
    sealed = seal({"run": run, "name": name, "bytes": len(data), "sha256": digest})
    content = _content_key(run, digest)
    if store.read(key) != sealed:
        store.put(content, data)
        store.flush(content)
    if not store.create(key, sealed):
        raise CommitConflict(f"blob {name} of run {run}", "choose another name")


def get_blob(store: Store, run: str, name: str) -> bytes:
    """Return a blob of a run, verified.

    Raises:
        NotFound: there is none of this name; lists those that there are.
        IntegrityError: it is damaged.
    """
    key = _pointer_key(run, name)
    data = store.read(key)
    if data is None:
        raise NotFound(f"blob {name} of run {run}", store.url, list_blobs(store, run))
    pointer = unseal(data, key)
    if (pointer.get("run"), pointer.get("name")) != (run, name):
        raise IntegrityError(key, "it belongs to another blob")
    content = _content_key(run, str(pointer["sha256"]))
    return verify(content, store.read(content), int(pointer["bytes"]), str(pointer["sha256"]))


def list_blobs(store: Store, run: str) -> list[str]:
    """Return the names of the blobs of a run, sorted."""
    found = store.children(f"{_run_prefix(run)}/blobs/names")
    return [name.removesuffix(_POINTER_SUFFIX) for name in found if name.endswith(_POINTER_SUFFIX)]


def _run_prefix(run: str) -> str:
    return f"runs/{check_name('run', run, RUN_NAME)}"


def _run_key(run: str) -> str:
    return f"{_run_prefix(run)}/{_RECORD}"


def _pointer_key(run: str, name: str) -> str:
    check_name("blob", name, BLOB_NAME)
    return f"{_run_prefix(run)}/blobs/names/{name}{_POINTER_SUFFIX}"


def _content_key(run: str, digest: str) -> str:
    return f"{_run_prefix(run)}/blobs/data/{digest}"
