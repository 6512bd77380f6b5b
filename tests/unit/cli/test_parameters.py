import enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from fusion_flows.cli import parameters
from fusion_flows.cli.errors import InputError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    layers: int = Field(3, gt=0)
    width: int = 8


class Config(BaseModel):
    steps: int = Field(5, gt=0)
    model: Inner = Inner()
    out: Path | None = None


class Strict(BaseModel):
    needed: int


def plain(count: int, name: str = "x", flag: bool = False, anything=None) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001


def configured(config: Config, resume: str | None = None, steps_done: int = 0) -> None: ...


def defaulted(config: Config = Config(steps=9, model=Inner(width=4))) -> None: ...  # noqa: B008


def two(first: Inner, second: Inner = Inner()) -> None: ...  # noqa: B008


def strict(config: Strict) -> None: ...


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("3", int, 3),
        ("3e-4", float, 3e-4),
        ("yes", bool, True),
        ("false", bool, False),
        ("/a/b", Path, Path("/a/b")),
        ("blue", Colour, Colour.BLUE),
        ("None", int | None, None),
        ("null", str | None, None),
        ("null", str, "null"),
        ("a=b", str, "a=b"),
        ("[1, 2]", list[int], [1, 2]),
        ('{"a": 1}', dict[str, int], {"a": 1}),
        ('{"layers": 2}', Inner, Inner(layers=2)),
        ("b", Literal["a", "b"], "b"),
        ("7", Annotated[int, Field(gt=3)], 7),
        ("[1]", Any, [1]),
        ("word", Any, "word"),
    ],
)
def test_a_text_is_read_by_its_annotation(text: str, annotation: object, value: object) -> None:
    read = parameters.read("name", text, annotation)
    assert read == value
    assert type(read) is type(value)


@given(st.integers() | st.none())
def test_every_number_survives(number: int | None) -> None:
    assert parameters.read("name", str(number), int | None) == number


@given(st.text(min_size=1))
def test_every_text_is_a_text(text: str) -> None:
    assert parameters.read("name", text, str) == text


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("few", int, "--set name=few: expected int"),
        ("maybe", bool, "expected bool"),
        ("green", Colour, "expected Colour (Input should be 'red' or 'blue')"),
        ("1,2", list[int], "expected list[int]"),
        ('[1, "a"]', list[int], "valid integer"),
        ("2", Annotated[int, Field(gt=3)], "expected int (Input should be greater than 3)"),
    ],
)
def test_a_wrong_text_is_one_line(text: str, annotation: object, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parameters.read("name", text, annotation)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_offers_its_fields_with_dots() -> None:
    assert list(parameters.slots(configured)) == [
        *("steps", "model", "model.layers", "model.width", "out"),
        *("config", "resume", "steps_done"),
    ]


def test_two_models_offer_only_themselves() -> None:
    assert list(parameters.slots(two)) == ["first", "second"]


def test_fields_become_the_model() -> None:
    found = parameters.arguments(configured, ["steps=7", "model.layers=2", "resume=r"])
    assert found == {"config": Config(steps=7, model=Inner(layers=2)), "resume": "r"}


def test_a_needed_model_of_defaults_need_not_be_named() -> None:
    assert parameters.arguments(configured, []) == {"config": Config()}


def test_fields_change_the_default_of_the_flow() -> None:
    found = parameters.arguments(defaulted, ["model.layers=1"])
    assert found == {"config": Config(steps=9, model=Inner(layers=1, width=4))}


def test_a_field_changes_a_model_that_is_given_as_a_whole() -> None:
    found = parameters.arguments(configured, ['config={"steps": 4}', "model.width=2"])
    assert found == {"config": Config(steps=4, model=Inner(width=2))}


@pytest.mark.parametrize(
    ("function", "settings", "expected"),
    [
        (plain, ["conut=3"], "did you mean count? its names are: count, name, flag, anything"),
        (plain, ["count"], "--set count: write it as name=value"),
        (plain, ["count=1", "count=2"], "--set count is given twice"),
        (plain, [], "the flow needs a value for count; add --set count=..."),
        (configured, ["model={}", "model.width=2"], "exclude each other"),
        (configured, ["model.width=2", "model={}"], "exclude each other"),
        (strict, [], "--set needed: Field required"),
    ],
)
def test_wrong_settings(function: Any, settings: list[str], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parameters.arguments(function, settings)
    assert expected in str(caught.value)
