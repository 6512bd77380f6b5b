"""Graphs and stage programs as bytes: canonical JSON, compressed.

What arrives from another machine is data: it is read with bounds, checked by `validate`, and only
then becomes a record. No pickle, no code, no torch file format.

Invariant: equal records give equal bytes (for one zlib version; `digest` does not depend on it).
"""

import hashlib
import json
import zlib
from typing import cast

from fusion_dask.errors import ProgramError
from fusion_dask.graph.codec import decode, encode
from fusion_dask.graph.ir import Graph, StageProgram
from fusion_dask.graph.validate import LIMITS, validate_graph, validate_program

__all__ = ["digest", "dumps_graph", "dumps_program", "loads_graph", "loads_program"]

_GRAPH = "fusion-graph/1"
_PROGRAM = "fusion-stage/1"


def dumps_graph(graph: Graph) -> bytes:
    """A graph as bytes."""
    return zlib.compress(_text(_GRAPH, graph), level=6)


def dumps_program(program: StageProgram) -> bytes:
    """A stage program as bytes."""
    return zlib.compress(_text(_PROGRAM, program), level=6)


def loads_graph(data: bytes) -> Graph:
    """Read and check a graph.

    Raises:
        ProgramError: The bytes are damaged, too large, or ask for something that is not allowed.
    """
    graph = cast("Graph", _read(data, _GRAPH, Graph))
    validate_graph(graph)
    return graph


def loads_program(data: bytes) -> StageProgram:
    """Read and check a stage program.

    Raises:
        ProgramError: The bytes are damaged, too large, or ask for something that is not allowed.
    """
    program = cast("StageProgram", _read(data, _PROGRAM, StageProgram))
    validate_program(program)
    return program


def digest(record: Graph | StageProgram) -> str:
    """SHA-256 of the canonical text."""
    kind = _GRAPH if isinstance(record, Graph) else _PROGRAM
    return hashlib.sha256(_text(kind, record)).hexdigest()


def _text(kind: str, record: Graph | StageProgram) -> bytes:
    data = {"format": kind, "body": encode(record)}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _read(data: bytes, kind: str, record: type) -> object:
    if len(data) > LIMITS.packed_bytes:
        raise ProgramError(f"the program has {len(data)} bytes; {LIMITS.packed_bytes} are allowed")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, LIMITS.text_bytes)
        if not unpacker.eof or unpacker.unconsumed_tail or unpacker.unused_data:
            raise ProgramError("the program is truncated or too large: transfer it again")
        found = json.loads(text.decode("ascii"))
    except (zlib.error, ValueError, RecursionError) as error:
        raise ProgramError(
            "the program is damaged: it is not the compressed text that was expected; transfer it "
            "again"
        ) from error
    if not isinstance(found, dict) or found.keys() != {"format", "body"}:
        raise ProgramError("the program is malformed: it has no format; make it again")
    if found["format"] != kind:
        raise ProgramError(
            f"the program has format {str(found['format'])[:40]!r} and {kind!r} is needed: use the "
            "same version on all machines"
        )
    return decode(record, found["body"])
