"""`fusion graph`: the table, the pictures, and one line for whatever is wrong."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from transformers import LlamaConfig

from fusion_flows.cli import main

SMALL = ("--layers", "2", "--width", "16", "--heads", "2", "--context", "8")

MODEL = """
import torch
from torch import nn

class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).mean()

class Bad(Good):
    def forward(self, x):
        if x.mean() > 0:
            return self.layer(x).mean()
        return x.mean()

def good():
    return Good(), {"x": torch.ones(2, 3)}

def bad():
    return Bad(), {"x": torch.ones(2, 3)}

def nothing():
    return 3

def broken():
    raise RuntimeError("no such luck")
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["graph", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def test_a_table_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gpt", *SMALL, "--stages", "2") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("parameters", "FLOPs", "sends", "memory", "all"))
    assert "transformer.wte" in out


def test_a_picture_and_its_numbers(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.html", "a.json"):
        assert run("gpt", *SMALL, "--stages", "2", "--out", str(tmp_path / name)) == 0
    drawn = (tmp_path / "a.svg").read_text()
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg")
    for text in ("stage 0", "stage 1", "transformer.h.0.attn.c_attn", "lm_head"):
        assert text in drawn
    assert drawn == (tmp_path / "b.svg").read_text()
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["stage"] for row in found["stages"]] == [0, 1]
    assert found["stages"][1]["sent_bytes"] == 0
    names = [block["module"] for block in found["blocks"]]
    crossing = [
        e
        for e in found["edges"]
        if found["blocks"][e["source"]]["stage"] != found["blocks"][e["target"]]["stage"]
    ]
    assert crossing
    assert "transformer.h.1.mlp.c_fc" in names
    assert sum(row["flops"] for row in found["stages"]) == sum(b["flops"] for b in found["blocks"])


def test_other_models(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "llama")
    assert run(str(tmp_path / "llama"), "--context", "8") == 0
    assert "embed_tokens" in capsys.readouterr().out
    assert run(f"{model}:good") == 0
    assert "layer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt", *SMALL, "--stages", "500"), "use at most"),
        (("gpt", *SMALL, "--heads", "3"), "heads divide width"),
        (("gpt", *SMALL, "--out", "x.pdf"), "must end in .svg"),
        (("gpt", *SMALL, "--out", "/nowhere/x.svg"), "a folder that exists"),
        (("nowhere",), "nothing is downloaded"),
        (("{model}",), "which function"),
        (("missing.py:make",), "no file"),
        (("{model}:bad",), "my_model.py:15 `if x.mean() > 0:`"),
        (("{model}:nothing",), "returns a int"),
        (("{model}:broken",), "no such luck"),
        (("{model}:absent",), "absent"),
        (("gpt", "--stages", "0"), "--stages"),
    ],
)
def test_one_line_for_what_is_wrong(
    arguments: tuple[str, ...], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(a.format(model=model) for a in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
