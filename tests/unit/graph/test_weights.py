"""Reading a stage's tensors from safetensors files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fusion_dask.errors import WeightsError
from fusion_dask.graph.capture import capture
from fusion_dask.graph.cut import cut, valid_positions
from fusion_dask.graph.ir import Graph
from fusion_dask.graph.weights import read_weights
from fusion_tasks.models import CausalLoss, meta_model

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=64,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    return capture(CausalLoss(meta_model(CONFIG)), {"input_ids": ids, "labels": ids})


@pytest.fixture(scope="module", params=["whole", "sharded"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = AutoModelForCausalLM.from_config(CONFIG)
    shard = "40KB" if request.param == "sharded" else "1GB"
    model.save_pretrained(folder, max_shard_size=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 3) == (request.param == "sharded")
    return folder, {n: p.detach() for n, p in model.state_dict().items()}


def test_each_stage_reads_its_own(
    graph: Graph, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, wanted = saved
    places = valid_positions(graph)
    read: set[str] = set()
    for program in cut(graph, [places[30], places[90]]):
        found = read_weights(folder, program.parameters)
        assert found.keys() == {p.name for p in program.parameters}
        assert all(torch.equal(t, wanted[name]) for name, t in found.items())
        read |= found.keys()
    assert read == {p.name for p in graph.parameters}


def test_a_tied_parameter_is_found_under_its_other_name(tmp_path: Path, graph: Graph) -> None:
    table = torch.randn(64, 32)
    save_file({"lm_head.weight": table}, tmp_path / "model.safetensors")
    tied = next(p for p in graph.parameters if p.aliases)
    assert tied.name == "model.embed_tokens.weight"
    assert torch.equal(read_weights(tmp_path, [tied])[tied.name], table)


def test_other_shards_need_not_exist(tmp_path: Path, graph: Graph) -> None:
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    part = next(p for p in graph.parameters if p.name == "model.norm.weight")
    for file in set(index.values()) - {index[part.name]}:
        (tmp_path / file).unlink()
    assert read_weights(tmp_path, [part])[part.name].shape == (32,)


def test_unusable_checkpoints_say_what_to_do(tmp_path: Path, graph: Graph) -> None:
    part = graph.parameters[0]
    with pytest.raises(WeightsError, match="no weights at"):
        read_weights(tmp_path, [part])
    file = tmp_path / "model.safetensors"
    save_file({"other": torch.zeros(3)}, file)
    with pytest.raises(WeightsError, match="has no tensor"):
        read_weights(tmp_path, [part])
    save_file({part.name: torch.zeros(3)}, file)
    with pytest.raises(WeightsError, match="use the configuration"):
        read_weights(tmp_path, [part])
    save_file({part.name: torch.zeros(part.spec.shape)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="damaged or incomplete"):
        read_weights(tmp_path, [part])


def test_an_index_cannot_point_outside_of_its_folder(tmp_path: Path, graph: Graph) -> None:
    part = graph.parameters[0]
    index = {"weight_map": {part.name: "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="outside of its folder"):
        read_weights(tmp_path, [part])
