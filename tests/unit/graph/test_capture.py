"""Capture: what a graph says about a module, and what it says when it cannot."""
# mypy: disable-error-code="no-any-return"

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_dask.errors import CaptureError
from fusion_dask.graph.capture import capture
from fusion_dask.graph.ir import Graph, Kind, Operator, Tag

X = {"x": torch.ones(3, 4)}


def named(graph: Graph, target: str) -> list[Operator]:
    return [o for o in graph.operators if o.target.split(".")[1] == target]


class Model(nn.Module):
    """A line of layers whose forward each test replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))).square().mean()


def test_tied_parameters_appear_once_under_their_first_name() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            graph = capture(Tied(), {"x": torch.ones(3, 4)})
        by_name = {p.name: p for p in graph.parameters}
        assert by_name["a.weight"].aliases == ("b.weight",)
        assert "b.weight" not in by_name
        assert ["a.weight" in o.inputs for o in named(graph, "linear")] == [True, True]


def test_the_order_of_parameters_is_that_of_the_module() -> None:
    model = Tied()
    assert [p.name for p in capture(model, X).parameters] == [
        n for n, _ in model.named_parameters()
    ]


def test_what_gets_no_gradient_is_not_trained() -> None:
    model = Tied()
    model.a.bias.requires_grad_(False)
    trained = {p.name for p in capture(model, X).parameters if p.trainable}
    assert trained == {"a.weight", "b.bias"}  # `unused` is kept, and not trained
    held = {p.name for p in capture(model, X).parameters}
    assert {"unused.weight", "unused.bias", "a.bias"} <= held


class Detached(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.a(x) * 2
        return F.mse_loss(self.b(x), target)


def test_no_grad_regions_stay_without_gradient() -> None:
    model = Detached()
    graph = capture(model, X)
    trained = {p.name for p in graph.parameters if p.trainable}
    assert trained == {"b.weight", "b.bias"}
    assert len(named(graph, "detach")) == 1
    model(**X).backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trained


def test_lines_inside_regions_are_known() -> None:
    graph = capture(Detached(), X)
    region = named(graph, "mul")[0]
    lines, start = inspect.getsourcelines(Detached.forward)
    assert region.source.endswith(f"test_capture.py:{start + 2}")
    assert "self.a(x) * 2" in lines[2]
    assert region.module == ""
    assert named(graph, "linear")[0].module == "a"


class Autocast(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.a(x).float().square().mean()


def test_autocast_becomes_casts() -> None:
    graph = capture(Autocast(), X)
    assert [v.spec.dtype for o in named(graph, "linear") for v in o.outputs if v] == ["bfloat16"]
    assert all(o.source for o in graph.operators)


class Kinds(Model):
    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(4, device=x.device) / 4 + torch.tensor([1.0, 2.0, 3.0, 4.0])
        hidden = F.dropout(self.a(x * positions), 0.5, self.training)
        logits = self.b(hidden)
        return {"loss": F.cross_entropy(logits, label), "logits": logits, "mask": positions > 1}


def test_kinds_and_gradients() -> None:
    batch = {"x": torch.ones(3, 4), "label": torch.zeros(3, dtype=torch.long)}
    graph = capture(Kinds(), batch)
    kinds = {o.target.split(".")[1]: o.kind for o in graph.operators}
    assert kinds["arange"] is kinds["mul"] is kinds["gt"] is Kind.FREE
    assert kinds["linear"] is Kind.PARAMETRIC
    assert kinds["native_dropout"] is Kind.STATELESS
    assert kinds["cross_entropy_loss"] is Kind.LOSS
    assert [o.target for o in graph.operators if o.random] == ["aten.native_dropout.default"]
    grads = {v.name: v.grad for o in graph.operators for v in o.outputs if v is not None}
    assert grads[named(graph, "linear")[0].name]
    assert not grads[named(graph, "mul")[0].name]
    assert [o.role for o in graph.outputs] == ["loss", "logits", "mask"]
    assert named(graph, "native_dropout")[0].outputs[1] is None
    assert len(graph.constants) == 1
    assert dict(named(graph, "arange")[0].kwargs)["device"] == Tag("device", "self")


def test_evaluation_has_no_dropout_and_no_gradient() -> None:
    batch = {"x": torch.ones(3, 4), "label": torch.zeros(3, dtype=torch.long)}
    model = Kinds()
    graph = capture(model, batch, training=False)
    assert not any(o.random for o in graph.operators)
    assert not any(v.grad for o in graph.operators for v in o.outputs if v is not None)
    assert model.training
    assert all(p.trainable for p in graph.parameters)


class Norm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("hidden", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.a(x)) * self.scale + self.hidden).square().mean()


def test_buffers_and_constants() -> None:
    model = Norm()
    before = {n: b.clone() for n, b in model.named_buffers()}
    graph = capture(model, X)
    assert [b.name for b in graph.buffers] == [
        "scale",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert [name for name, _ in graph.buffer_updates] == [
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert [c.name for c in graph.constants] == ["hidden"]
    assert graph.buffers[0].data == before["scale"].numpy().tobytes()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert capture(model, X, training=False).buffer_updates == ()


def test_the_module_is_left_as_it_was() -> None:
    model = Norm()
    model.a.eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    capture(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.a.training, model.norm.training) == (True, False, True)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not model._forward_hooks


class Same(Model):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(y)


def test_aliased_example_inputs_stay_two_inputs() -> None:
    x = torch.ones(3, 4)
    graph = capture(Same(), {"x": x, "y": x})
    assert [v.name for v in graph.inputs] == ["x", "y"]
    first, second = named(graph, "linear")
    assert (first.inputs[0], second.inputs[0]) == ("x", "y")
    assert [o.role for o in graph.outputs] == ["output0", "output1"]


def test_views_become_reshapes() -> None:
    class View(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).view(2, 6)

    graph = capture(View(), X)
    assert [o.target for o in graph.operators][-1] == "aten.reshape.default"


class Branch(Model):
    def forward(self, x: Tensor) -> Tensor:
        if self.a(x).mean() > 0:
            return self.b(x).mean()
        return x.mean()


class Sized(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)[x[:, 0] > 0].mean()


class Item(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).mean() * float(x.sum())


class Numpy(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + torch.from_numpy(x.detach().numpy())


class Linalg(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svd(self.a(x))[1].sum()


class Writes(Model):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.a(x).mean()


class Vector(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.a(x)}


class Wrong(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x @ x)


@pytest.mark.parametrize(
    ("kind", "line", "advice"),
    [
        (Branch, "if self.a(x).mean() > 0:", "torch.where"),
        (Sized, "return self.a(x)[x[:, 0] > 0].mean()", "mask"),
        (Item, "return self.a(x).mean() * float(x.sum())", "tensor"),
        (Linalg, "return torch.linalg.svd(self.a(x))[1].sum()", "standard torch operators"),
        (Vector, "return {", "scalar"),
        (Wrong, "return self.a(x @ x)", "torch operators"),
        (Numpy, "torch.from_numpy", "torch operators"),
    ],
)
def test_refusals_name_the_line_and_the_way_out(
    kind: type[Model], line: str, advice: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(kind(), X)
    message = str(caught.value)
    number = inspect.getsourcelines(kind.forward)[1]
    found = re.search(r"test_capture\.py:(\d+)", message)
    assert found is not None, message
    assert int(found[1]) in range(number, number + 4)
    assert advice in message
    assert "\n" not in message
    if kind is not Vector:
        assert line in message
    assert capfd.readouterr() == ("", "")


def test_writing_to_an_input_is_refused() -> None:
    with pytest.raises(CaptureError, match="in place to 'x'"):
        capture(Writes(), X)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": 3}, "is a int"),
        ({"z": torch.ones(3, 4)}, "takes no input 'z'; it takes x"),
        ({}, "needs x: give an example"),
    ],
)
def test_wrong_inputs(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Tied(), inputs)


def test_an_input_may_not_be_named_like_state() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.x * x).mean()

    with pytest.raises(CaptureError, match="rename the argument"):
        capture(Clash(), X)


def test_a_constant_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = Norm()
        with pytest.raises(CaptureError, match=r"'hidden'.*build that one on the CPU"):
            capture(model, {"x": torch.ones(3, 4)})
