"""`fusion plan`: the table, the JSON, what binds, and refusals that say what is missing."""

import json
from pathlib import Path

import pytest

from fusion_dask.planner.advice import Task, advise, missing
from fusion_dask.planner.pool import parse_pool, pool_from_json
from fusion_dask.planner.records import ANY, ENGINE, Objective, Workload
from fusion_dask.planner.shapes import shape_cost, shape_named
from fusion_flows.cli import main, plan_inputs
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.plan_inputs import read_model, read_pool
from fusion_flows.cli.plan_show import shape_of

SMALL = ("--microbatches", "8", "--context", "128")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    return int(ended.value.code or 0)


def task(pool: str, *, model: str = "gpt2", runnable: bool = False) -> Task:
    return Task(
        model=shape_cost(shape_named(model), context=128),
        pool=parse_pool(pool).workers,
        workload=Workload(microbatches=8),
        objective=Objective.THROUGHPUT,
        capabilities=ENGINE if runnable else ANY,
    )


def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gpt2", "--pool", "2*rtx3080", "--link", "1gbit/1ms", *SMALL) == 0
    out = capsys.readouterr().out
    assert "gpt2 on 2 rtx3080" in out
    for said in ("stage", "memory", "tokens/s", "bubble", "binds: the", "one more device: rtx3080"):
        assert said in out
    assert "for a million tokens" in out


def test_a_plan_as_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gpt2", "--pool", "2*rtx3080", "--runnable", "--json", *SMALL) == 0
    plain = json.loads(capsys.readouterr().out)
    (replica,) = plain["replicas"]
    assert replica["schedule"] == "1f1b"
    stages = replica["stages"]
    edges = [(s["start"], s["stop"]) for s in stages]
    assert [a for a, _ in edges] == [0, *(z for _, z in edges[:-1])]
    assert not any(s["recomputes"] for s in stages)
    assert plain["prediction"]["cost_per_token"] > 0
    used = {s["worker"] for s in stages}
    assert used | set(plain["backup"]) == {"rtx3080-0", "rtx3080-1"}
    assert set(plain["advice"]["doubled"]) == {"device", "link", "memory"}


def test_an_unknown_price_is_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gpt2", "--pool", "a100-80gb-sxm", "--json", *SMALL) == 0
    assert json.loads(capsys.readouterr().out)["prediction"]["cost_per_token"] is None
    assert run("gpt2", "--pool", "a100-80gb-sxm", *SMALL) == 0
    assert "cost – for a million tokens" in capsys.readouterr().out
    assert run("gpt2", "--pool", "a100-80gb-sxm", "--objective", "cost", *SMALL) == 2
    assert "price of a100-80gb-sxm-0 is unknown" in capsys.readouterr().err


def test_a_refusal_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gpt2-xl", "--pool", "2*rtx3080+rtx2080", *SMALL) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "gpt2-xl needs" in err
    assert "the pool has 25.20 GB free" in err
    assert "Enough would be 1 more rtx3080, or 1 more rtx2080" in err


def test_what_is_missing_is_enough_and_no_less() -> None:
    asked = task("2*rtx3080", model="gpt2-xl")
    count = missing(asked)["rtx3080"]
    assert count is not None
    assert task(f"{2 + count}*rtx3080", model="gpt2-xl").plan()
    if count > 1:
        with pytest.raises(Exception, match="needs"):
            task(f"{1 + count}*rtx3080", model="gpt2-xl").plan()


def test_no_number_of_small_devices_holds_a_large_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The embedding alone takes 8.4 GB.
    assert missing(task("rtx3070", model="llama3-8b", runnable=True)) == {"rtx3070": None}
    assert run("llama3-8b", "--pool", "rtx3070", "--runnable", *SMALL) == 2
    assert "More of rtx3070 will not do" in capsys.readouterr().err


def test_what_binds_is_what_helps_most() -> None:
    slow = Task(
        model=shape_cost(shape_named("gpt2-xl"), context=128),
        pool=pool_from_json([{"gpu": "rtx3080", "count": 4, "link": "10mbit/50ms"}]).workers,
        workload=Workload(microbatches=8),
        objective=Objective.THROUGHPUT,
        capabilities=ENGINE,
    )
    found = advise(slow, slow.plan())
    assert found.binds == "link"
    assert found.doubled["link"] > 0.5
    alone = task("rtx4090")
    advice = advise(alone, alone.plan())
    assert advice.binds == "device"
    assert advice.doubled["device"] == pytest.approx(1.0, rel=0.01)
    assert advice.doubled["link"] == 0
    assert min([*advice.doubled.values(), *advice.one_more.values()]) >= 0


def test_shapes_of_plans_in_words() -> None:
    (replica,) = task("rtx4090", runnable=True).plan().replicas
    assert shape_of((replica, replica)).startswith("2 pipelines of 1 stages, 1f1b, 8 microbatches")


def test_a_live_pool_is_what_the_broker_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    status: dict[str, object] = {"members": [], "time": 0.0}

    def answer(cluster: str | None) -> object:
        asked.append(cluster)
        return status

    monkeypatch.setattr(plan_inputs, "_status", answer)
    with pytest.raises(InputError, match="nobody who was measured"):
        read_pool("live", link=None, cluster="host")
    assert asked == ["host"]


def test_files_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    path.write_text('[{"gpu": "rtx3080", "count": 2}]')
    assert len(read_pool(str(path), link="1gbit/1ms", cluster=None).workers) == 2
    path.write_text("[")
    with pytest.raises(InputError, match="not JSON"):
        read_pool(str(path), link=None, cluster=None)
    with pytest.raises(InputError, match="No such file"):
        read_pool(str(tmp_path / "none.json"), link=None, cluster=None)
    with pytest.raises(InputError, match="--link"):
        read_pool("rtx3080", link="fast", cluster=None)


def test_models_are_shapes_or_captured(tmp_path: Path) -> None:
    shape = read_model("llama-7b", batch=2, context=64, dtype="float16")
    assert (shape.tokens, shape.dtype) == (128, "float16")
    captured = read_model("gpt", batch=2, context=64, dtype="float32")
    assert captured.tokens == 128
    assert captured.flops > 0
    with pytest.raises(InputError, match="llama-7b"):
        read_model("llama-8b", batch=1, context=None, dtype="float16")
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 50,
                "max_position_embeddings": 64,
            }
        )
    )
    assert read_model(str(config), batch=1, context=32, dtype="float32").tokens == 32


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt2", "--pool", "rtx1"), "not in the catalogue"),
        (("gpt2", "--pool", "rtx3080", "--dtype", "int8"), "float16"),
        (("gpt2", "--pool", "rtx3080", "--context", "9999"), "1 to 1024 tokens"),
        (("nothing", "--pool", "rtx3080"), "no model"),
        (("gpt2", "--pool", "rtx3080", "--objective", "luck"), "objective"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
