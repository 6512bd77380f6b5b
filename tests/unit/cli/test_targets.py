import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusion_flows.cli import errors, procedure, store, targets
from fusion_flows.cli.errors import InputError
from fusion_flows.cli.location import BUILT_IN, Location, locate
from fusion_flows.cli.readiness import check_reach
from fusion_flows.cli.targets import Target

ONE = "from prefect import flow\n@flow\ndef only(): ...\n"
TWO = ONE + "@flow\ndef other(): ...\n"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    importlib.invalidate_caches()


def resolve(folder: Path, text: str, name: str | None = None, file: str = "a_flow.py") -> Target:
    (folder / file).write_text(text)
    return targets.resolve(locate(f"{folder / file}{f':{name}' if name else ''}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pretrian", "did you mean pretrain? TARGET is one of pretrain, or a file"),
        ("folder", "there is no procedure named folder"),
        ("nowhere.py", "there is no file nowhere.py"),
        ("nowhere.py:name", "there is no file nowhere.py"),
    ],
)
def test_a_target_that_is_not_there(text: str, expected: str) -> None:
    with pytest.raises(InputError, match="there is no") as caught:
        locate(text)
    assert expected in str(caught.value)


def test_a_procedure_goes_by_its_name() -> None:
    assert locate("pretrain") == Location(
        text="pretrain", module=BUILT_IN["pretrain"], flow_name="pretrain"
    )


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("x = 1", None, "has no flow; decorate a function"),
        (TWO, None, "has several flows"),
        (TWO, "third", "has no flow named third; its flows are: only, other"),
        ("import not_there", None, "does not load: ModuleNotFoundError: No module named"),
        ("x = 1\n1 / 0", None, "ZeroDivisionError: division by zero (line 2)"),
        ("def f(:", None, "does not load: SyntaxError"),
        ("raise SystemExit(3)", None, "does not load: SystemExit: 3 (line 1)"),
    ],
)
def test_a_file_that_does_not_do(
    tmp_path: Path, text: str, name: str | None, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        resolve(tmp_path, text, name)
    assert expected in str(caught.value)


def test_the_only_flow_needs_no_name_and_an_imported_one_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text(TWO)
    text = "from beside_it import other\nfrom prefect import flow\n@flow\ndef mine(): other()\n"
    found = resolve(tmp_path, text)
    assert found.name == "mine"
    assert found.flow.fn.__name__ == "mine"
    assert {module.__name__ for module in found.own_modules} == {"a_flow", "beside_it"}


def test_a_file_may_be_called_like_a_module(tmp_path: Path) -> None:
    found = resolve(tmp_path, ONE, file="json.py")
    assert found.own_modules[0].__name__ == "json_flow_file"
    assert "site-packages" not in repr(sys.modules["json"])
    assert not hasattr(sys.modules["json"], "only")


def test_a_function_that_travelled_by_value_shows_its_file_again(tmp_path: Path) -> None:
    text = "def broken():\n    raise KeyError('gone')\n" + ONE
    found = resolve(tmp_path, text)
    travelled: dict[str, Any] = {}
    exec(compile(text, procedure.DYNAMIC, "exec"), travelled)

    with pytest.raises(KeyError) as caught:
        travelled["broken"]()

    shown = procedure.excerpt(caught.value, found)
    assert f'{tmp_path}/a_flow.py", line 2, in broken' in shown
    assert "raise KeyError('gone')" in shown
    assert procedure.DYNAMIC not in shown


def test_a_store_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store.check_writable(str(tmp_path / "new" / "store"))
    store.check_writable("s3://somewhere/else")
    with pytest.raises(InputError, match="file is not a folder"):
        store.check_writable(f"file://{tmp_path}/file/store")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_workers_elsewhere_cannot_reach_our_loopback() -> None:
    check_reach("tcp://x:1", {"workers": {"tcp://127.0.0.1:4000": {}}})
    with pytest.raises(InputError, match=r"workers on 192\.0\.2\.7 cannot reach"):
        check_reach("tcp://x:1", {"workers": {"tcp://192.0.2.7:4000": {}}})


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_errors_survive_pickling(name: str) -> None:
    error = getattr(errors, name)("what to do")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), "what to do")
