"""Cutting: who holds and ships what."""

# mypy: disable-error-code="no-any-return"

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_dask.errors import PlanError
from fusion_dask.graph.capture import capture
from fusion_dask.graph.cut import boundary_bytes, cut, cut_like, holders, valid_positions
from fusion_dask.graph.ir import Graph, Kind, StageProgram


class Skips(nn.Module):
    """Layers in a row; the first result is used again by the last, the table by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[0].get_parameter("weight")

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        mask = torch.arange(4, device=x.device) > 1
        first = h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h) * mask
        h = self.head(h + first)
        return {"loss": F.mse_loss(h, y), "first": first.detach() * 2}


def _graph() -> Graph:
    torch.manual_seed(0)
    return capture(Skips(), {"x": torch.ones(2, 4), "y": torch.ones(2, 4)})


GRAPH = _graph()
LINEAR = [i for i, o in enumerate(GRAPH.operators) if o.target == "aten.linear.default"]


def sent(programs: tuple[StageProgram, ...]) -> dict[tuple[int, int], list[str]]:
    return {
        (p.index, port.stage): [v.name for v in port.values] for p in programs for port in p.sends
    }


def test_values_go_straight_to_each_consumer() -> None:
    programs = cut(GRAPH, LINEAR[1:])
    first = GRAPH.operators[LINEAR[0]].name
    ports = sent(programs)
    # Stage 3 adds it to the last hidden state, stage 4 reports it.
    assert ports[0, 1] == ports[0, 3] == ports[0, 4] == [first]
    assert set(ports) == {(0, 1), (0, 3), (0, 4), (1, 2), (2, 3), (3, 4)}
    for program in programs:
        for port in program.receives:
            assert [v.name for v in port.values] == ports[port.stage, program.index]
        assert [port.stage for port in program.receives] == sorted(
            port.stage for port in program.receives
        )


def test_free_operators_are_repeated_where_they_are_needed_and_nowhere_else() -> None:
    programs = cut(GRAPH, LINEAR[1:])
    has_mask = [any(o.target == "aten.arange.start" or "arange" in o.target for o in p.operators)
                for p in programs]  # fmt: skip
    assert has_mask == [False, True, True, True, False]
    shipped = {name for names in sent(programs).values() for name in names}
    free = {o.name for o in GRAPH.operators if o.kind is Kind.FREE}
    assert free
    assert not shipped & free


def test_inputs_are_read_where_they_are_needed() -> None:
    programs = cut(GRAPH, LINEAR[1:])
    assert [[v.name for v in p.inputs] for p in programs] == [["x"], [], [], [], ["y"]]


def test_tied_parameters_are_held_by_all_their_readers() -> None:
    programs = cut(GRAPH, LINEAR[1:])
    name = "layers.0.weight"
    assert [name in {p.name for p in s.parameters} for s in programs] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert programs[0].shared == programs[4].shared == ((name, (0, 4)),)
    assert holders(programs)[name] == (0, 4)
    assert all(p.shared == () for p in programs[1:4])


def test_outputs_stay_with_their_stage() -> None:
    programs = cut(GRAPH, LINEAR[1:])
    roles = [[o.role for o in p.outputs] for p in programs]
    assert roles == [[], [], [], [], ["loss", "first"]]
    assert [o.role for o in cut(GRAPH, [len(GRAPH.operators) - 1])[1].outputs] == ["first"]


def test_a_stage_that_only_reports_returns_no_gradient() -> None:
    class Reports(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.a(x)
            return {"loss": h.mean(), "seen": self.b(h).detach()}

    graph = capture(Reports(), {"x": torch.ones(2, 4)})
    position = next(i for i, o in enumerate(graph.operators) if "b.weight" in o.inputs)
    left, right = cut(graph, [position])
    (port,) = right.receives
    assert [v.grad for v in port.values] == [False]
    assert [v.grad for v in left.sends[0].values] == [False]
    assert [p.name for p in right.parameters if p.trainable] == []


def test_a_cast_weight_stays_with_its_consumer() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.b.weight.double().t().float()
            return (self.a(x) @ weight).mean()

    graph = capture(Casts(), {"x": torch.ones(2, 64)})
    product = next(i for i, o in enumerate(graph.operators) if "matmul" in o.target)
    left, right = cut(graph, [product])
    assert [p.name for p in left.parameters] == ["a.weight", "a.bias"]
    assert [p.name for p in right.parameters] == ["b.weight"]
    assert (
        sum(port.bytes for port in left.sends) == 2 * 64 * 4 == boundary_bytes(graph)[product - 1]
    )


class SharedNorm(nn.Module):
    """One batch norm applied twice, with a layer between: its buffers cannot be parted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.norm(x)))).mean()


def test_a_buffer_is_not_parted_from_its_update() -> None:
    graph = capture(SharedNorm(), {"x": torch.randn(5, 4)})
    allowed = valid_positions(graph)
    last_norm = max(i for i, o in enumerate(graph.operators) if "batch_norm" in o.target)
    assert allowed
    assert all(i > last_norm for i in allowed)
    with pytest.raises(PlanError, match="valid_positions"):
        cut(graph, [last_norm])
    for program in cut(graph, [allowed[0]]):
        assert {b for b, _ in program.buffer_updates} == {b.name for b in program.buffers}


@pytest.mark.parametrize("positions", [[0], [len(GRAPH.operators)], [5, 5], [6, 3], [-1]])
def test_positions_must_ascend_within_the_graph(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend strictly"):
        cut(GRAPH, positions)


def test_state_that_nothing_reads_lives_in_the_first_stage() -> None:
    class Unused(Skips):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4)
            self.register_buffer("note", torch.ones(2))

    graph = capture(Unused(), {"x": torch.ones(2, 4), "y": torch.ones(2, 4)})
    first, second = cut(graph, [valid_positions(graph)[2]])
    assert {"spare.weight", "spare.bias"} <= {p.name for p in first.parameters}
    assert [b.name for b in first.buffers] == ["note"]
    assert not second.buffers


def test_as_many_stages_as_operators_with_parameters() -> None:
    parametric = [i for i, o in enumerate(GRAPH.operators) if o.kind is Kind.PARAMETRIC]
    programs = cut(GRAPH, parametric[1:])
    assert len(programs) == len(parametric)
    assert all(p.parameters for p in programs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_is_whole(data: st.DataObject) -> None:
    allowed = range(1, len(GRAPH.operators))
    positions = sorted(data.draw(st.sets(st.sampled_from(allowed), max_size=6)))
    programs = cut(GRAPH, positions)
    owners = [o.name for p in programs for o in p.operators if o.kind is not Kind.FREE]
    assert sorted(owners) == sorted(o.name for o in GRAPH.operators if o.kind is not Kind.FREE)
    assert {p.name for s in programs for p in s.parameters} == {p.name for p in GRAPH.parameters}
    for program in programs:
        known = {v.name for v in program.inputs} | {p.name for p in program.parameters}
        known |= {c.name for c in program.constants} | {b.name for b in program.buffers}
        known |= {v.name for port in program.receives for v in port.values}
        for operator in program.operators:
            assert set(operator.inputs) <= known
            known |= {v.name for v in operator.outputs if v is not None}
    assert [o.role for p in programs for o in p.outputs if o.role == "loss"] == ["loss"]


def test_evaluation_is_cut_like_training() -> None:
    model = Skips()
    batch = {"x": torch.ones(2, 4), "y": torch.ones(2, 4)}
    trained = cut(capture(model, batch), LINEAR[1:])
    evaluation = capture(model, batch, training=False)
    programs = cut_like(evaluation, holders(trained))
    assert [[p.name for p in s.parameters] for s in programs] == [
        [p.name for p in s.parameters] for s in trained
    ]
    with pytest.raises(PlanError, match="single stage"):
        cut_like(evaluation, {"layers.1.weight": 1, "layers.2.weight": 0})
    assert len(cut_like(evaluation, {p.name: 0 for p in evaluation.parameters})) == 1
