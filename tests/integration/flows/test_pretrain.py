"""`fusion run pretrain` as a person runs it: real processes, a real Prefect server, real text."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from fusion_storage.checkpoint import latest, read_tensors
from fusion_storage.store import open_store

SMALL = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch": 8,
    "microbatches": 2,
    "checkpoint_every": 10,
    "validation_windows": 16,
    "learning_rate": 0.01,
    "warmup": 2,
}


class Shell:
    """Runs `fusion` in a folder of its own, with a home of its own."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.store = home / "store"
        self.folder = folder
        self._environment = {**os.environ, "FUSION_HOME": str(home), "COLUMNS": "120"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", "from fusion_flows.cli import main; main()", *arguments],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def pretrain(self, *options: str, **settings: object) -> list[str]:
        chosen = [f"--set={name}={value}" for name, value in {**SMALL, **settings}.items()]
        return ["run", "pretrain", *options, *chosen]

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        store = open_store(self.store)
        checkpoint = latest(store, run)
        assert checkpoint is not None
        return read_tensors(checkpoint, store, checkpoint.tensor_names)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """One home for all: Prefect's database is made once."""
    return Shell(tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("cwd"))


LOAD = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not any(name.startswith("fusion") for name in sys.modules)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer("def main(", return_tensors="pt").input_ids
out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
print(json.dumps({"text": tokenizer.decode(out[0]), "tokens": out.shape[1]}))
"""


def test_a_run_learns_publishes_and_is_resumed_bit_for_bit(shell: Shell) -> None:
    code, output = shell.run(*shell.pretrain(name="whole", steps=40))
    assert code == 0, output
    assert "step 40/40 (100 %)" in output
    assert "bubble" in output
    run = shell.folder / "fusion-runs" / "whole"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = (run / "summary.md").read_text()
    assert "| 0 | w0 |" in summary
    assert "| 1 | w1 |" in summary

    loaded = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(run / "model")],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )
    said = json.loads(loaded.stdout.splitlines()[-1])
    assert said["text"].startswith("def main(")
    assert said["tokens"] == len("def main(") + 8

    # The same run, interrupted between checkpoints, then resumed.
    process = shell.start(*shell.pretrain(name="half_s.2", steps=40))
    deadline = time.monotonic() + 120
    assert process.stdout is not None
    for line in process.stdout:
        assert time.monotonic() < deadline
        if line.startswith("step 1"):  # step 1x: past the first checkpoint
            number = int(line.split("/")[0].removeprefix("step "))
            if number > 10:
                process.send_signal(signal.SIGINT)
                break
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert "fusion run pretrain --resume half_s.2" in rest
    store = open_store(shell.store)
    kept = latest(store, "half_s.2")
    assert kept is not None
    assert 10 <= kept.step < 40

    code, output = shell.run("run", "pretrain", "--resume", "half_s.2")
    assert code == 0, output

    whole, halves = shell.weights("whole"), shell.weights("half_s.2")
    assert whole.keys() == halves.keys()
    assert all(torch.equal(halves[name], tensor) for name, tensor in whole.items())
    report = latest(store, "half_s.2")
    assert report is not None
    history = report.metadata["history"]
    assert [record["step"] for record in history["steps"]] == list(range(1, 41))


def test_a_killed_worker_costs_the_steps_since_the_checkpoint_and_nothing_else(
    shell: Shell,
) -> None:
    """The flow goes on by itself on the worker that is left over, to the same bits."""
    options = ("--workers", "3", "--threads-per-worker", "1")
    settings: dict[str, object] = {"steps": 40, "stages": 2}
    code, output = shell.run(*shell.pretrain(*options, name="calm", **settings))
    assert code == 0, output

    process = shell.start(*shell.pretrain(*options, name="struck", **settings))
    assert process.stdout is not None
    struck = False
    for line in process.stdout:
        if line.startswith("step ") and int(line.split("/")[0].removeprefix("step ")) > 20:
            victims = [
                child
                for child in psutil.Process(process.pid).children(recursive=True)
                if "distributed.cli.dask_worker" in (command := child.cmdline())
                and command[command.index("--name") + 1] == "w0"
            ]
            for victim in victims:
                victim.kill()
            struck = bool(victims)
            break
    rest, _ = process.communicate(timeout=200)

    assert struck, rest
    assert process.returncode == 0, rest
    summary = (shell.folder / "fusion-runs" / "struck" / "summary.md").read_text()
    assert "| w2 |" in summary  # the spare took part
    calm, after = shell.weights("calm"), shell.weights("struck")
    assert calm.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in calm.items())


BAD = {
    "missing text": (["--set", "data=/no/such/text"], "no file or folder /no/such/text", 2),
    "unknown name": (["--set", "learning_rat=1"], "did you mean learning_rate", 2),
    "wrong type": (["--set", "steps=many"], "expected int", 2),
    "out of bounds": (["--set", "steps=0"], "greater than or equal to 1", 2),
    "indivisible": (["--set", "batch=10", "--set", "microbatches=4"], "not a multiple", 2),
    "unknown run": (["--resume", "never-was"], "never-was", 1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_what_to_do(shell: Shell, name: str) -> None:
    options, expected, exit_code = BAD[name]
    before = sorted(shell.store.rglob("*")) if shell.store.exists() else []

    code, output = shell.run("run", "pretrain", *options)

    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == exit_code, output
    assert len(errors) == 1, output
    assert expected in errors[0]
    assert "Traceback" not in output
    assert (sorted(shell.store.rglob("*")) if shell.store.exists() else []) == before


def test_what_the_text_or_the_model_cannot_do_is_one_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    cases: list[tuple[dict[str, object], str]] = [
        ({"data": tmp_path / "empty.txt"}, "empty"),
        ({"stages": 40}, "40 stages need 40 workers"),
    ]
    for settings, expected in cases:
        code, output = shell.run(*shell.pretrain(**settings))
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        assert code == 1, output
        assert len(errors) == 1, output
        assert expected in errors[0]
        assert not list((shell.folder / "fusion-runs").glob("pretrain-*"))
