"""Checkpoints: parts written by many workers, made visible by one manifest.

    runs/<run>/data/<step>/<part>-<attempt>/...     private to one attempt, never overwritten
    runs/<run>/checkpoints/<step>.json              the manifest, written last, create-if-absent

Covers writing, committing, reading and removing. Invariants: a checkpoint exists when its manifest
does and is whole then; of two commits of one step one wins and the other is told; a tensor is read
back bit for bit whatever partition wrote it, or `IntegrityError` names what is damaged; reading some
tensors reads their bytes only; a manifest is removed before its data, so that a crash leaves garbage
and never a checkpoint with holes, and the newest checkpoint always stays.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_storage.errors import CommitConflict, IntegrityError, NotFound
from fusion_storage.names import ATTEMPT_NAME, RUN_NAME, array_path, check_name
from fusion_storage.records import Checkpoint, Part
from fusion_storage.sealed import JSON, seal, unseal
from fusion_storage.store import Store
from fusion_storage.tensors import read_arrays, write_arrays
from fusion_storage.verified import RecordingStore, VerifyingStore

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Checkpoint",
    "Part",
    "checkpoint_steps",
    "collect",
    "commit",
    "latest",
    "load_checkpoint",
    "read_tensors",
    "write_part",
]

_MANIFEST = re.compile(r"(\d{8,})\.json")


def write_part(
    store: Store, *, run: str, step: int, part: str, attempt: str, tensors: Mapping[str, "Tensor"]
) -> Part:
    """Write a worker's tensors; nobody sees them until `commit`.

    When this returns, the bytes are durable. The tensors must not change meanwhile.

    Args:
        store: Where to.
        run: The run's name.
        step: The number of steps that the checkpoint contains.
        part: Whose tensors these are, for example `stage-0`.
        attempt: Never used before for this part and step: a random id, for example.
        tensors: By their global names.

    Raises:
        CommitConflict: the attempt id was used before.
        StoreUnavailable: the store cannot be written.
    """
    check_name("part", part, ATTEMPT_NAME)
    check_name("attempt", attempt, ATTEMPT_NAME)
    prefix = f"{_data_prefix(run, step)}/{part}-{attempt}"
    if store.list(prefix):
        raise CommitConflict(prefix, "give each attempt an id of its own")
    recording = RecordingStore(store.zarr(prefix))
    write_arrays(recording, tensors)
    store.flush(prefix)
    return Part(
        part=part,
        prefix=prefix,
        tensors=tuple(sorted(tensors)),
        files=recording.files,
    )


def commit(
    store: Store, *, run: str, step: int, parts: Sequence[Part], metadata: Mapping[str, JSON]
) -> Checkpoint:
    """Make a checkpoint visible, whole, by writing its manifest.

    Committing the same parts and metadata once more changes nothing and succeeds, so that a lost
    answer can be answered by a retry.

    Raises:
        ValueError: two parts hold one tensor, or a part belongs to another run or step.
        CommitConflict: this step was committed from other parts or with other metadata.
        IntegrityError: an object of a part is not there with its size.
    """
    parts = tuple(sorted(parts, key=lambda part: part.part))
    _check_parts(run, step, parts)
    key = _manifest_key(run, step)
    manifest = seal(
        {
            "run": run,
            "step": step,
            "parts": [part.to_json() for part in parts],
            "metadata": metadata,
        }
    )
    if store.read(key) is None:
        for part in parts:
            _check_present(store, part)
    if not store.create(key, manifest):
        raise CommitConflict(
            f"checkpoint {step} of run {run}", "load it, and go on from there or stop this writer"
        )
    return _parse(manifest, run, step)


def checkpoint_steps(store: Store, run: str) -> list[int]:
    """Return the steps that are committed, ascending."""
    found = (_MANIFEST.fullmatch(name) for name in store.children(_manifest_prefix(run)))
    return sorted(int(match[1]) for match in found if match)


def load_checkpoint(store: Store, run: str, step: int) -> Checkpoint:
    """Return a committed checkpoint; its tensors are read by `read_tensors`.

    Raises:
        NotFound: there is no such checkpoint; lists the steps that there are.
        IntegrityError: its manifest is damaged.
    """
    data = store.read(_manifest_key(run, step))
    if data is None:
        steps = [str(there) for there in checkpoint_steps(store, run)]
        raise NotFound(f"checkpoint {step} of run {run}", store.url, steps)
    return _parse(data, run, step)


def latest(store: Store, run: str) -> Checkpoint | None:
    """Return the newest committed checkpoint, or None when there is none.

    Raises:
        IntegrityError: its manifest is damaged; an older one is not taken silently.
    """
    for step in reversed(checkpoint_steps(store, run)):
        data = store.read(_manifest_key(run, step))
        if data is not None:  # it may have been collected since it was listed
            return _parse(data, run, step)
    return None


def read_tensors(checkpoint: Checkpoint, store: Store, names: Iterable[str]) -> dict[str, "Tensor"]:
    """Read tensors of a checkpoint, verified, into writable memory of their own on the CPU.

    Raises:
        NotFound: the checkpoint has no tensor of such a name.
        IntegrityError: an object is missing, short or altered.
    """
    wanted = list(names)
    owner = {name: part for part in checkpoint.parts for name in part.tensors}
    unknown = [name for name in wanted if name not in owner]
    if unknown:
        what = f"tensor {unknown[0]} in checkpoint {checkpoint.step} of run {checkpoint.run}"
        raise NotFound(what, store.url, checkpoint.tensor_names)
    found: dict[str, Tensor] = {}
    for part in checkpoint.parts:
        mine = [name for name in wanted if owner[name] is part]
        if mine:
            place = f"{part.prefix}/"
            verifying = VerifyingStore(store.zarr(part.prefix), part.files, place=place)
            found |= read_arrays(verifying, mine)
    return {name: found[name] for name in wanted}


def collect(store: Store, run: str, keep: int) -> list[int]:
    """Keep the newest `keep` checkpoints of a run; remove the rest and abandoned attempts.

    An attempt is abandoned when a later step is committed and no kept manifest names it. Attempts
    at or after the newest commit may still be at work and are left alone.

    Args:
        store: Where the run is.
        run: Its name.
        keep: How many to keep, at least 1.

    Returns:
        The steps that were removed.

    Raises:
        IntegrityError: a kept manifest is damaged; nothing of the data was removed then.
    """
    if keep < 1:
        raise ValueError(f"keep at least one checkpoint, got {keep}")
    data = f"{_run_prefix(run)}/data"
    steps = checkpoint_steps(store, run)
    kept, removed = steps[-keep:], steps[:-keep]
    live = {p.prefix for step in kept for p in load_checkpoint(store, run, step).parts}
    for step in removed:
        store.delete(_manifest_key(run, step))
    for name in store.children(data) if kept else []:
        if name.isdecimal() and int(name) < kept[-1]:
            _sweep(store, f"{data}/{name}", live)
    return removed


def _manifest_key(run: str, step: int) -> str:
    return f"{_manifest_prefix(run)}/{_step_name(step)}.json"


def _run_prefix(run: str) -> str:
    return f"runs/{check_name('run', run, RUN_NAME)}"


def _manifest_prefix(run: str) -> str:
    return f"{_run_prefix(run)}/checkpoints"


def _data_prefix(run: str, step: int) -> str:
    return f"{_run_prefix(run)}/data/{_step_name(step)}"


def _step_name(step: int) -> str:
    if step < 0:
        raise ValueError(f"a checkpoint's step must not be negative, got {step}")
    return f"{step:08d}"


def _check_parts(run: str, step: int, parts: Sequence[Part]) -> None:
    place = f"{_data_prefix(run, step)}/"
    owner: dict[str, Part] = {}
    for part in parts:
        if not part.prefix.startswith(place):
            raise ValueError(f"part {part.prefix} does not belong to step {step} of run {run}")
        for name in part.tensors:
            if name in owner:
                both = f"{owner[name].part} and {part.part}"
                raise ValueError(f"tensor {name} is in two parts of step {step}: {both}")
            if f"{array_path(name)}/zarr.json" not in part.files:
                raise ValueError(f"part {part.part} names tensor {name} but holds no array of it")
            owner[name] = part


def _check_present(store: Store, part: Part) -> None:
    there = store.sizes(part.prefix)
    for key, (size, _) in part.files.items():
        found = there.get(f"{part.prefix}/{key}")
        if found != size:
            reason = "it is missing" if found is None else f"it has {found} of {size} bytes"
            raise IntegrityError(f"{part.prefix}/{key}", reason)


def _parse(data: bytes, run: str, step: int) -> Checkpoint:
    key = _manifest_key(run, step)
    record = unseal(data, key)
    try:
        if (record["run"], record["step"]) != (run, step):
            raise IntegrityError(key, f"it is of step {record['step']} of run {record['run']}")
        parts = tuple(Part.from_json(part) for part in record["parts"])
        _check_parts(run, step, parts)
        metadata = dict(record["metadata"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(key, f"it is not a manifest: {error}") from error
    return Checkpoint(run=run, step=step, parts=parts, metadata=metadata)


def _sweep(store: Store, prefix: str, live: set[str]) -> None:
    attempts = [f"{prefix}/{name}" for name in store.children(prefix)]
    if not live.intersection(attempts):
        store.delete(prefix)
        return
    for attempt in attempts:
        if attempt not in live:
            store.delete(attempt)
