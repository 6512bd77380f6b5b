"""A published model needs `transformers` and nothing of this project, and no network."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from fusion_tasks.publish import publish
from fusion_tasks.tokenizer import load_tokenizer

TIMEOUT_S = 120
PROMPT = "def f(x):"
NEW_TOKENS = 8

# The process must fail, not merely do without, as soon as it touches this project or the network.
ALONE = """
import socket, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("fusion_"):
            raise ImportError(f"{name} must not be needed")

def refuse(*_):
    raise OSError("the network must not be needed")

sys.meta_path.insert(0, Refuse())
socket.socket.connect = refuse
try:
    import fusion_tasks
except ImportError:
    pass
else:
    sys.exit("fusion_tasks can be imported: this test shows nothing")

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

prompt, new_tokens, *directories = sys.argv[1:]
for directory in directories:
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(prompt, return_tensors="pt")
    written = model.generate(
        **inputs, max_new_tokens=int(new_tokens), min_new_tokens=int(new_tokens), do_sample=False
    )
    with torch.no_grad():
        logits = model(**inputs).logits
    text = tokenizer.decode(written[0])
    assert text.startswith(prompt), text
    save_file({"logits": logits, "written": written}, directory + ".safetensors")
assert not [name for name in sys.modules if name.startswith("fusion_")]
"""


def configs() -> dict[str, PretrainedConfig]:
    llama: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return {
        "gpt2": GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "llama": LlamaConfig(**llama, tie_word_embeddings=False),
        "llama-tied": LlamaConfig(**llama, tie_word_embeddings=True),
    }


def test_plain_transformers_loads_and_generates_without_this_project(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(None)
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    expected: dict[str, torch.Tensor] = {}
    for name, config in configs().items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.train(False)
        publish(tmp_path / name, config, tokenizer, dict(model.named_parameters()))
        with torch.no_grad():
            expected[name] = model(prompt).logits
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-c", ALONE, PROMPT, str(NEW_TOKENS)),
            *(str(tmp_path / name) for name in expected),
        ],
        cwd=tmp_path,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, logits in expected.items():
        seen = load_file(tmp_path / f"{name}.safetensors")
        assert seen["written"].shape == (1, len(PROMPT) + NEW_TOKENS)
        torch.testing.assert_close(seen["logits"], logits, rtol=1e-6, atol=1e-6)
