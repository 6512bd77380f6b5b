"""`fusion simulate`: what is printed, written and drawn, and the headline."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from fusion_flows.cli import main

SMALL = (
    *("--model", "gpt2-xl", "--pool", "8*rtx3080", "--link", "1gbit/5ms"),
    *("--microbatches", "8", "--context", "128", "--hours", "6", "--spare", "3", "--runnable"),
)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    return int(ended.value.code or 0)


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(*SMALL, "--json", *arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert isinstance(plain, dict)
    return plain


def test_everything_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--churn", "0.5/h") == 0
    out = capsys.readouterr().out
    for said in (
        "8 rtx3080; 1gbit/5ms",
        "tokens/s over 6.0 h",
        "MFU, bubble",
        "recovery",
        "J/token",
        "per million tokens",
        "taken over by the backup pool",
        "fullest of",
        "busiest links",
    ):
        assert said in out


def test_churn_costs_and_a_seed_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    calm, lively = result(capsys), result(capsys, "--churn", "0.5/h")
    assert calm["losses"] == 0
    assert int(str(lively["losses"])) > 0
    assert float(str(lively["tokens_per_s"])) < float(str(calm["tokens_per_s"]))
    assert lively == result(capsys, "--churn", "0.5/h")
    assert lively != result(capsys, "--churn", "0.5/h", "--seed", "1")
    back = result(capsys, "--churn", "0.5/h", "--no-journal")
    assert back["budget"] != lively["budget"]


def test_a_recorded_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{"at_s": 5000, "worker": "rtx3080-0", "event": "quit"}]))
    found = result(capsys, "--churn", str(path))
    spans = found["spans"]
    assert isinstance(spans, list)
    assert [s["worker"] for s in spans if s["state"] == "away"] == ["rtx3080-0"]
    path.write_text(json.dumps([{"at_s": 5000, "worker": "other", "event": "quit"}]))
    assert run(*SMALL, "--churn", str(path)) == 2
    assert "not in the pool" in capsys.readouterr().err


def test_a_page_is_self_contained_and_repeats(tmp_path: Path) -> None:
    for name in ("a.html", "b.html", "a.json"):
        assert run(*SMALL, "--churn", "0.5/h", "--out", str(tmp_path / name)) == 0
    text = (tmp_path / "a.html").read_text()
    assert text == (tmp_path / "b.html").read_text()
    assert not re.search(r"<script|<link|<img|src=|@import|url\(", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3
    step, loss, hours = (ElementTree.fromstring(p) for p in pictures)
    space = "{http://www.w3.org/2000/svg}"
    for picture in (step, loss, hours):
        _, _, width, height = (float(v) for v in (picture.get("viewBox") or "").split())
        assert width <= 1280
        assert height <= 800
        for bar in picture.iter(f"{space}rect"):
            assert 0 <= float(bar.get("x") or -1) <= width
            assert float(bar.get("x") or 0) + float(bar.get("width") or 0) <= width
    titles = {t.text for t in step.iter(f"{space}title")}
    assert "forward of microbatch 0, stage 0" in titles
    assert "lost, until the replacement is ready" in {t.text for t in loss.iter(f"{space}title")}
    assert {"away", "backup", "stage 0"} <= {t.text for t in hours.iter(f"{space}title")}
    plain = json.loads((tmp_path / "a.json").read_text())
    assert plain["asked"]["churn"] == "0.5/h"
    assert plain["step"]["intervals"]


def test_a_pool_without_prices_has_no_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", "gpt2", "--pool", "a100-80gb-sxm", "--microbatches", "4", "--hours", "1")
    assert run(*words, "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["cost"] is plain["cost_per_million_tokens"] is None
    assert run(*words) == 0
    assert re.search(r"cost\s+–", capsys.readouterr().out)


def test_the_headline_states_its_inputs_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--headline") == 0
    out = capsys.readouterr().out
    abstract, assumed = out.split("Assumed by this project:")
    assert "50 RTX 3080 against 4 H100" in abstract
    for said in ("12.4 Gbit/s", "5.76", "2.33", "1.51", "273 Mbit/s", "0.98", "0.75", "$34,950"):
        assert said in assumed
    assert "16.0 kW" in assumed
    assert "no: it does not fit" in assumed
    assert run("--headline", "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert len(plain["rows"]) == 10
    assert plain["assumptions"]
    assert plain["links_bits_per_s"][0] == 8e6
    assert plain["links_bits_per_s"][-1] == 10e9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pool", "2*rtx3080", "--model", "llama-7b"), "more rtx3080"),
        (("--pool", "2*rtx3080", "--churn", "often"), "0.1/h"),
        (("--pool", "2*rtx3080", "--out", "x.pdf"), ".html or .json"),
        (("--pool", "2*rtx3080", "--out", "/no/such/x.html"), "a folder that exists"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.rstrip("\n").count("\n") == 0
