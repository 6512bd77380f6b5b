"""Programs as bytes: round trips, and what hostile or damaged bytes meet."""

import copy
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fusion_dask.errors import ProgramError
from fusion_dask.graph import programs
from fusion_dask.graph.capture import capture
from fusion_dask.graph.cut import cut, valid_positions
from fusion_dask.graph.ir import Graph, StageProgram
from fusion_dask.graph.operators import ALLOWED, is_allowed, resolve
from fusion_dask.graph.programs import (
    digest,
    dumps_graph,
    dumps_program,
    loads_graph,
    loads_program,
)
from fusion_dask.graph.validate import Limits


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training)
        h = h.masked_fill(h > 3, float("-inf")).clamp(min=-1.0)
        return nn.functional.mse_loss(self.second(h) + self.table, y)


def _graph() -> Graph:
    torch.manual_seed(0)
    return capture(Small(), {"x": torch.zeros(3, 4), "y": torch.zeros(3, 4)})


GRAPH = _graph()
PROGRAM = cut(GRAPH, [valid_positions(GRAPH)[-1]])[1]
BODY = json.loads(zlib.decompress(dumps_program(PROGRAM)))


def packed(body: object) -> bytes:
    return zlib.compress(json.dumps(body, allow_nan=False).encode())


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The bytes of the program after a change to its JSON."""
    data = copy.deepcopy(BODY)
    change(data["body"])
    return packed(data)


def operator(body: dict[str, Any], target: str) -> dict[str, Any]:
    found: dict[str, Any] = next(o for o in body["operators"] if target in o["target"])
    return found


def test_round_trips_and_determinism() -> None:
    assert loads_graph(dumps_graph(GRAPH)) == GRAPH
    assert dumps_graph(_graph()) == dumps_graph(GRAPH)
    for program in cut(GRAPH, valid_positions(GRAPH)[:2]):
        assert loads_program(dumps_program(program)) == program
    assert digest(PROGRAM) != digest(GRAPH)
    assert loads_program(packed(BODY)) == PROGRAM


def test_numbers_keep_their_kind() -> None:
    arguments = [a for o in GRAPH.operators for a in (*o.args, *(v for _, v in o.kwargs))]
    again = loads_graph(dumps_graph(GRAPH))
    found = [a for o in again.operators for a in (*o.args, *(v for _, v in o.kwargs))]
    assert [type(a) for a in arguments] == [type(a) for a in found]
    assert float("-inf") in arguments


def test_it_is_small_and_not_a_pickle() -> None:
    data = dumps_program(PROGRAM)
    assert len(data) < 3000
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default",
        "aten.set_.source_Storage",
        "aten.resize_.default",
        "aten.resize.default",
        "aten.add_.Tensor",
        "aten.add.out",
        "aten.empty.memory_format",
        "aten.nonzero.default",
        "aten._local_scalar_dense.default",
        "aten.linear",
        "aten.linear.default.default",
        "aten.__class__.default",
        "prims.add.default",
        "os.system.default",
        "higher_order.cond.default",
        "",
    ],
)
def test_operators_outside_of_the_table_are_refused(target: str, tmp_path: Path) -> None:
    assert not is_allowed(target)
    with pytest.raises(ProgramError, match="not allowed"):
        resolve(target)
    with pytest.raises(ProgramError):
        loads_program(changed(lambda body: body["operators"][0].update(target=target)))


def test_from_file_does_not_touch_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "made"
    call = {"target": "aten.from_file.default", "args": [str(file), True, 100], "kwargs": []}
    with pytest.raises(ProgramError):
        loads_program(changed(lambda body: body["operators"][0].update(call)))
    assert not file.exists()


def test_everything_in_the_table_exists_and_is_functional() -> None:
    for name in ALLOWED:
        packet = getattr(torch.ops.aten, name)
        overloads = [o for o in packet.overloads() if is_allowed(f"aten.{name}.{o}")]
        assert overloads, name
        for overload in overloads:
            assert not getattr(packet, overload)._schema.is_mutable


def _huge(body: dict[str, Any]) -> None:
    body["operators"].insert(
        0,
        {
            "name": "bomb",
            "target": "aten.arange.default",
            "args": [1 << 50],
            "outputs": [{"name": "bomb", "spec": {"shape": [4], "dtype": "int64"}}],
        },
    )


def _loop(body: dict[str, Any]) -> None:
    first = body["operators"][0]
    first["args"][0] = {"r": first["outputs"][0]["name"]}


def _wrong_shape(body: dict[str, Any]) -> None:
    operator(body, "linear")["outputs"][0]["spec"]["shape"] = [3, 5]


def _nested(body: dict[str, Any]) -> None:
    value: Any = 1
    for _ in range(50):
        value = [value]
    body["operators"][0]["args"].append(value)


def _pieces(body: dict[str, Any]) -> None:
    body["inputs"][0]["spec"]["shape"] = [1 << 34]
    body["operators"].insert(
        0,
        {
            "name": "bomb",
            "target": "aten.unbind.int",
            "args": [{"r": body["inputs"][0]["name"]}],
            "outputs": [{"name": "bomb", "spec": {"shape": [], "dtype": "float32"}}],
        },
    )


def _unkeyed(body: dict[str, Any]) -> None:
    name = body["inputs"][0]["name"]
    body["operators"].insert(
        0,
        {
            "name": "noise",
            "target": "aten.rand_like.default",
            "args": [{"r": name}],
            "outputs": [{"name": "noise", "spec": body["inputs"][0]["spec"]}],
        },
    )


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "memory bomb": (_huge, "declared"),
    "too many pieces": (_pieces, "makes 17179869184 values"),
    "random without a key": (_unkeyed, "random"),
    "gradient of integers": (
        lambda b: b["inputs"][0].update(grad=True, spec={"shape": [3, 4], "dtype": "int64"}),
        "cannot carry a gradient",
    ),
    "operator reads itself": (_loop, "before it is made"),
    "wrong declared shape": (_wrong_shape, "declared"),
    "deep nesting": (_nested, "nested"),
    "too large a tensor": (lambda b: b["inputs"][0]["spec"].update(shape=[1 << 40]), "too large"),
    "negative size": (lambda b: b["inputs"][0]["spec"].update(shape=[-1]), "negative"),
    "unknown dtype": (lambda b: b["inputs"][0]["spec"].update(dtype="object"), "unknown"),
    "unknown field": (lambda b: b.update(code="print()"), "wrong fields"),
    "missing field": (lambda b: b.pop("operators"), "wrong fields"),
    "bool for a number": (lambda b: b.update(index=True), "expected int"),
    "huge number": (lambda b: b.update(index=1 << 80), "64-bit"),
    "stage out of range": (lambda b: b.update(index=7), "out of range"),
    "port to nowhere": (lambda b: b["receives"][0].update(stage=9), "out of order"),
    "unknown tag": (
        lambda b: b["operators"][0].update(kwargs=[["dtype", {"t": ["dtype", "__class__"]}]]),
        "not allowed",
    ),
    "unknown keyword": (
        lambda b: b["operators"][0].update(kwargs=[["shell", True]]),
        "does not take",
    ),
    "missing argument": (lambda b: operator(b, "linear").update(args=[]), "does not take"),
    "wrong argument": (
        lambda b: operator(b, "linear")["args"].__setitem__(0, "text"),
        "does not fit",
    ),
    "two values of one name": (
        lambda b: b["operators"].append(b["operators"][0]),
        "two values",
    ),
    "output of nothing": (lambda b: b["outputs"][0].update(value="ghost"), "made by nothing"),
    "constant of wrong size": (lambda b: b["constants"][0].update(data="AAAA"), "wrong size"),
    "constant that is no base64": (lambda b: b["constants"][0].update(data="*"), "base64"),
    "unknown initialisation": (
        lambda b: b["parameters"][0]["init"][0].update(op="__reduce__"),
        "initialisation",
    ),
    "long name": (lambda b: b["operators"][0].update(module="x" * 5000), "short name"),
    "shared with strangers": (lambda b: b.update(shared=[["ghost", [0, 1]]]), "inconsistent"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tampered_programs_are_refused(name: str) -> None:
    change, message = CHANGES[name]
    with pytest.raises(ProgramError, match=message):
        loads_program(changed(change))


def test_compressed_bombs_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LIMITS", Limits(packed_bytes=10_000, text_bytes=100_000))
    with pytest.raises(ProgramError, match="too large"):
        loads_program(zlib.compress(b" " * 5_000_000))
    with pytest.raises(ProgramError, match="are allowed"):
        loads_program(b"x" * 10_001)
    with pytest.raises(ProgramError, match="damaged"):
        loads_program(zlib.compress(b"[" * 90_000))


@pytest.mark.parametrize(
    "data", [b"", b"junk", zlib.compress(b""), zlib.compress(b"{}"), zlib.compress(b"NaN")]
)
def test_what_is_no_program_is_refused(data: bytes) -> None:
    with pytest.raises(ProgramError):
        loads_program(data)


def test_a_graph_is_not_a_stage() -> None:
    with pytest.raises(ProgramError, match="same version"):
        loads_program(dumps_graph(GRAPH))


def test_every_truncation_is_refused() -> None:
    data = dumps_program(PROGRAM)
    for length in range(len(data)):
        with pytest.raises(ProgramError):
            loads_program(data[:length])
    with pytest.raises(ProgramError):
        loads_program(data + b"x")


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(1, 255))
def test_flipped_bytes_are_refused(position: int, value: int) -> None:
    data = bytearray(dumps_program(PROGRAM))
    data[position % len(data)] ^= value
    try:
        found = loads_program(bytes(data))
    except ProgramError:
        return
    assert found == PROGRAM  # a byte that zlib ignores


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["aten.add.Tensor", "aten.from_file.default", "x", "float32", "linear"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["r", "t", "f", "name", "spec"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def places(data: dict[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found: list[tuple[Any, Any]] = []
    for key, item in items:
        found.append((data, key))
        if isinstance(item, dict | list):
            found += places(item)
    return found


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_is_refused_or_harmless(data: st.DataObject) -> None:
    tree = copy.deepcopy(BODY)
    spots = places(tree)
    container, key = spots[data.draw(st.integers(0, len(spots) - 1))]
    container[key] = data.draw(JSON)
    try:
        found = loads_program(packed(tree))
    except ProgramError:
        return
    assert isinstance(found, StageProgram)
    assert all(is_allowed(o.target) for o in found.operators)


def test_errors_survive_pickling() -> None:
    with pytest.raises(ProgramError) as caught:
        loads_program(b"junk")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
