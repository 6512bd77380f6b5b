"""One capture serves any batch size, where the model allows it."""

import pytest
import torch
from torch import Tensor, nn

from fusion_dask.errors import CaptureError
from fusion_dask.graph.capture import capture
from fusion_dask.graph.cut import cut, valid_positions
from fusion_dask.graph.sizes import SizedGraph, capture_sizes
from support.stages import run_stages
from support.zoo import ZOO


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "two-tower", "vae"])
def test_any_size_equals_a_capture_at_that_size(name: str) -> None:
    module, batch = ZOO[name].make()
    sized = capture_sizes(module, batch)
    for size in (1, 7) if name != "resnet" else (6, 7):
        larger = {key: torch.cat([t[:1]] * size) for key, t in batch.items()}
        assert sized.at(size) == capture(module, larger)


def test_it_computes_at_another_size_with_the_same_cut() -> None:
    module, batch = ZOO["llama"].make()
    sized = capture_sizes(module, batch)
    position = valid_positions(sized.small)[40]
    state = {name: p.detach() for name, p in module.named_parameters()}
    for size in (1, 5):
        inputs = {k: torch.randint(0, 64, (size, t.shape[1])) for k, t in batch.items()}
        found = run_stages(cut(sized.at(size), [position]), state, inputs)
        assert torch.equal(found.outputs["loss"], module(**inputs).detach())


def test_only_some_inputs_may_be_batched() -> None:
    module, batch = ZOO["gnn"].make()
    with pytest.raises(CaptureError, match="name with `batched`"):
        capture_sizes(module, batch)
    sized = capture_sizes(module, batch, batched={"x", "y"})
    assert [v.spec.shape[0] for v in sized.at(20).inputs] == [20, 2, 20]


class Scaled(nn.Module):
    """Has the size of the batch as a number, or as a branch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.kind == "number":
            return y.sum() * (1 / x.shape[0])
        if self.kind == "branch" and x.shape[0] % 2:
            y = y.relu()
        if self.kind == "square":
            return y.mean() + torch.arange(x.shape[0] ** 2, device=x.device).float().mean()
        return y.mean()


@pytest.mark.parametrize("kind", ["number", "branch", "square"])
def test_models_that_change_with_the_batch_are_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match="changes with the size of the batch"):
        capture_sizes(Scaled(kind), {"x": torch.ones(4, 3)})


def test_sizes_are_positive() -> None:
    graph = capture(Scaled("plain"), {"x": torch.ones(4, 3)})
    with pytest.raises(ValueError, match="at least one"):
        SizedGraph(size=4, small=graph, large=graph).at(0)
