"""What is particular to a backend, and to `open_store`."""

import errno
import os
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from fusion_storage.errors import StoreUnavailable
from fusion_storage.remote import Dialect, FsspecBackend, plain_dialect
from fusion_storage.s3 import dialect as s3_dialect
from fusion_storage.store import open_store


class Refused(Exception):
    """As botocore words an error of the server."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


def refused(code: str, error: type[OSError] = OSError) -> OSError:
    """Make the error that s3fs raises for an error code of the server."""
    translated = error(errno.EINVAL, code)
    translated.__cause__ = Refused(code)
    return translated


class FakeS3:
    """A file system that answers a conditional PUT as told."""

    def __init__(self, answer: Exception | None) -> None:
        self.answer = answer
        self.calls: list[dict[str, object]] = []

    def pipe_file(self, path: str, data: bytes, **options: object) -> None:
        self.calls.append(options)
        if self.answer is not None:
            raise self.answer


def memory_backend(
    create: Callable[[Any, str, bytes], bool], *, is_place_missing: bool = False
) -> FsspecBackend:
    dialect = Dialect(
        options={},
        errors=(OSError,),
        create=create,
        is_place_missing=lambda _: is_place_missing,
        has_folders=False,
    )
    return FsspecBackend(f"memory://{uuid.uuid4().hex}", dialect)


def test_local_paths_and_urls_name_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {
        open_store(place).url for place in ("s", "./s", tmp_path / "s", f"file://{tmp_path}/s")
    }
    assert named == {f"file://{tmp_path}/s"}


def test_opening_writes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert store.read("a") is None
    assert store.list() == []
    assert list(tmp_path.iterdir()) == []


def test_check_writable_removes_the_folders_it_made(tmp_path: Path) -> None:
    open_store(tmp_path / "a" / "b").check_writable()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_store(tmp_path / "file" / "store")
    with pytest.raises(StoreUnavailable) as caught:
        store.check_writable()
    message = str(caught.value)
    assert str(tmp_path / "file" / "store") in message
    assert "Not a directory" in message
    assert "permissions" in message
    assert "\n" not in message


@pytest.mark.parametrize("act", ["put", "create", "read", "list", "delete"])
def test_every_act_on_a_broken_place_is_unavailable(tmp_path: Path, act: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_store(tmp_path / "file" / "store")
    arguments = ("a", b"x") if act in ("put", "create") else ("a",)
    with pytest.raises(StoreUnavailable):
        getattr(store, act)(*arguments)


def test_unfinished_local_files_are_invisible_and_go_with_their_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a/b", b"1")
    (tmp_path / "a" / ".tmp-left-by-a-crash").write_bytes(b"torn")
    assert store.list() == ["a/b"]
    assert store.children("a") == ["b"]
    with pytest.raises(ValueError, match="not allowed"):
        store.read("a/.tmp-left-by-a-crash")
    store.delete("a")
    assert list(tmp_path.iterdir()) == []


def test_local_writes_leave_no_temporary_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", b"1")
    store.create("b", b"1")
    store.create("b", b"2")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_pickled_store_is_the_same_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.read("a") == b"1"


def test_secrets_are_not_shown() -> None:
    store = open_store("s3://bucket/prefix", key="name", secret="hidden-word")
    assert "hidden-word" not in repr(store) + str(store) + store.url + repr(store.zarr("a"))
    assert pickle.loads(pickle.dumps(store)) == store


def test_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="must not hold a password") as caught:
        open_store("sftp://user:hidden-word@host/path")
    assert "hidden-word" not in str(caught.value)


def test_local_store_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes no options"):
        open_store(tmp_path, secret="x")


def test_unknown_protocol_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="Protocol not known"):
        open_store("nosuch://place").check_writable()


def test_lost_answer_to_our_own_create_is_a_success() -> None:
    def write_and_lose_the_answer(file_system: MemoryFileSystem, path: str, data: bytes) -> bool:
        if not file_system.exists(path):
            file_system.pipe_file(path, data)
        return False

    backend = memory_backend(create=write_and_lose_the_answer)
    assert backend.create("a", b"ours")
    assert not backend.create("a", b"theirs")
    assert backend.read("a") == b"ours"


def test_plain_fsspec_with_folders(tmp_path: Path) -> None:
    backend = FsspecBackend(f"file://{tmp_path}/root", plain_dialect("file", {}))
    backend.probe()
    backend.put("a/b/c", b"12")
    assert backend.create("a/d", b"1")
    assert not backend.create("a/d", b"2")
    assert backend.sizes("") == {"a/b/c": 2, "a/d": 1}
    assert backend.children("a") == ["b", "d"]
    backend.delete("a")
    assert backend.sizes("") == {}


def test_missing_bucket_is_not_a_missing_object() -> None:
    backend = memory_backend(create=lambda *_: False, is_place_missing=True)
    with pytest.raises(StoreUnavailable):
        backend.read("a")


def test_plain_fsspec_never_caches() -> None:
    options = plain_dialect("memory", {}).options
    assert options == {"use_listings_cache": False, "skip_instance_cache": True}


def test_a_missing_bucket_is_never_made() -> None:
    assert not s3_dialect({}).has_folders
    assert not plain_dialect("gs", {}).has_folders
    assert plain_dialect("sftp", {}).has_folders


def test_s3_options_are_safe_and_explicit_ones_win() -> None:
    options = s3_dialect({"key": "k", "config_kwargs": {"read_timeout": 1}}).options
    assert options["use_listings_cache"] is False
    assert options["max_concurrency"] == 1
    assert options["skip_instance_cache"] is True
    assert options["config_kwargs"]["read_timeout"] == 1
    assert options["config_kwargs"]["connect_timeout"] == 5


@pytest.mark.parametrize(
    ("answer", "created"),
    [
        (None, True),
        (refused("PreconditionFailed"), False),
        (refused("ConditionalRequestConflict"), False),
        (FileExistsError(), False),
    ],
)
def test_s3_create_is_one_conditional_put(answer: Exception | None, created: bool) -> None:
    fake = FakeS3(answer)
    assert s3_dialect({}).create(fake, "bucket/a", b"x" * 10) is created
    (options,) = fake.calls
    assert options["mode"] == "create"
    assert options["chunksize"] == 5 * 2**30, "a multipart upload is not conditional everywhere"


def test_s3_create_does_not_hide_other_errors() -> None:
    with pytest.raises(OSError, match="SlowDown"):
        s3_dialect({}).create(FakeS3(refused("SlowDown")), "bucket/a", b"")


def test_s3_tells_a_missing_bucket() -> None:
    is_place_missing = s3_dialect({}).is_place_missing
    assert is_place_missing(refused("NoSuchBucket", FileNotFoundError))
    assert not is_place_missing(refused("NoSuchKey", FileNotFoundError))
    assert not is_place_missing(FileNotFoundError())
