"""Errors carry their data, fit on a line and survive pickling."""

import importlib
import pickle
import pkgutil

import pytest

import fusion_storage
from fusion_storage.errors import (
    CommitConflict,
    IntegrityError,
    NotFound,
    StorageError,
    StoreUnavailable,
)

ERRORS = [
    StoreUnavailable("s3://b", "a reason\nof two lines", "do that"),
    IntegrityError("a/b", "it is missing"),
    CommitConflict("run x", "do that"),
    NotFound("run x", "s3://b", ["a", "b"]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_survives_pickling_on_one_line(error: StorageError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert "\n" not in str(error)


def test_long_lists_are_cut() -> None:
    assert str(NotFound("x", "u", [str(n) for n in range(30)])).endswith("10, 11 and 18 more")
    assert str(NotFound("x", "u", [])).endswith("there is: nothing of that kind")


def test_every_module_says_what_is_public() -> None:
    for module in pkgutil.iter_modules(fusion_storage.__path__):
        loaded = importlib.import_module(f"fusion_storage.{module.name}")
        assert all(hasattr(loaded, name) for name in loaded.__all__), module.name
