"""What every store must do: a backend's test inherits these classes and gives the `store` fixture."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from fusion_storage.checkpoint import (
    Part,
    checkpoint_steps,
    collect,
    commit,
    latest,
    load_checkpoint,
    read_tensors,
    write_part,
)
from fusion_storage.errors import CommitConflict, IntegrityError, NotFound
from fusion_storage.runs import create_run, get_blob, list_blobs, list_runs, put_blob, read_run
from fusion_storage.store import Store

if TYPE_CHECKING:
    from fusion_storage.sealed import JSON

__all__ = ["CheckpointContract", "RunContract", "StoreContract", "tensors_of", "write_step"]

RUN = "run-1"


def tensors_of(seed: int) -> dict[str, Tensor]:
    """Make the state of a small stage: several chunks' worth of names, dtypes and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "h.0.weight": torch.randn(40, 16, generator=generator),
        "h.0.weight/exp_avg": torch.randn(40, 16, generator=generator).to(torch.bfloat16),
        "h.0.weight/step": torch.tensor(float(seed)),
        "h.0.mask": torch.rand(7, generator=generator) > 0.5,
        "h.0.empty": torch.zeros(0, 3),
        "h.0.zeros": torch.zeros(40, 16),
        "h.0.more_zeros": torch.full((40, 16), 1.0),
    }


def write_step(store: Store, step: int, *, attempt: str = "a") -> list[Part]:
    """Write the two parts of a checkpoint without committing it."""
    named = tensors_of(step)
    first = {name: named.pop(name) for name in list(named)[:2]}
    return [
        write_part(store, run=RUN, step=step, part=part, attempt=attempt, tensors=tensors)
        for part, tensors in (("stage-0", first), ("stage-1", named))
    ]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


class StoreContract:
    def test_absent_object_is_none(self, store: Store) -> None:
        assert store.read("no/such/object") is None

    def test_put_then_read(self, store: Store) -> None:
        for key, data in (("a", b""), ("b/c/d%2Fe~1", b"x" * 100_000), ("b/c2", b"\0\xff")):
            store.put(key, data)
            assert store.read(key) == data
        store.put("view", memoryview(b"abcd")[1:3])
        assert store.read("view") == b"bc"

    def test_folder_is_no_object(self, store: Store) -> None:
        store.put("folder/object", b"1")
        assert store.read("folder") is None

    def test_create_keeps_the_first(self, store: Store) -> None:
        assert store.create("a/b", b"first")
        assert not store.create("a/b", b"second")
        assert store.read("a/b") == b"first"

    def test_create_again_with_the_same_bytes_succeeds(self, store: Store) -> None:
        assert store.create("a", b"same")
        assert store.create("a", b"same")

    def test_of_racing_creators_exactly_one_wins(self, store: Store) -> None:
        writers = 4
        for race in range(10):
            start = threading.Barrier(writers)

            def create(
                number: int, key: str = f"race/{race}", start: threading.Barrier = start
            ) -> bool:
                start.wait(timeout=30)
                return store.create(key, b"%d" % number)

            with ThreadPoolExecutor(writers) as pool:
                won = list(pool.map(create, range(writers)))
            assert won.count(True) == 1
            assert store.read(f"race/{race}") == b"%d" % won.index(True)

    def test_list_is_sorted_fresh_and_by_whole_segments(self, store: Store) -> None:
        assert store.list("x") == []
        for key in ("x/b", "x/a/2", "x/a/1", "xy", "y"):
            store.put(key, b"12")
        assert store.list("x") == ["x/a/1", "x/a/2", "x/b"]
        assert store.list() == ["x/a/1", "x/a/2", "x/b", "xy", "y"]
        assert store.list("x/b") == ["x/b"]
        assert store.sizes("x/a") == {"x/a/1": 2, "x/a/2": 2}
        store.delete("x/a")
        store.put("x/c", b"")
        assert store.list("x") == ["x/b", "x/c"]

    def test_children(self, store: Store) -> None:
        assert store.children("x") == []
        for key in ("x/b", "x/a/2", "x/a/1", "y"):
            store.put(key, b"")
        assert store.children("x") == ["a", "b"]
        assert store.children() == ["x", "y"]
        assert store.children("x/b") == []

    def test_delete_one_or_all_below(self, store: Store) -> None:
        for key in ("x/a", "x/ab", "x/c/d"):
            store.put(key, b"")
        store.delete("x/a")
        assert store.list() == ["x/ab", "x/c/d"]
        store.delete("x")
        store.delete("x")
        assert store.list() == []

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "a/./b", "a\\b", "a\0b"])
    def test_key_cannot_leave_the_store(self, store: Store, key: str) -> None:
        with pytest.raises(ValueError, match="not allowed"):
            store.put(key, b"")

    def test_check_writable_leaves_nothing(self, store: Store) -> None:
        store.check_writable()
        assert store.list() == []
        assert store.children() == []

    def test_flush_returns(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        for prefix in ("a", "a/b/c"):
            store.flush(prefix)


class CheckpointContract:
    def test_round_trip(self, store: Store) -> None:
        written = commit(
            store, run=RUN, step=7, parts=write_step(store, 7), metadata={"position": [1, 2]}
        )
        found = latest(store, RUN)
        assert found == written == load_checkpoint(store, RUN, 7)
        assert found.metadata == {"position": [1, 2]}
        assert found.tensor_names == tuple(sorted(tensors_of(7)))
        assert_equal(read_tensors(found, store, tensors_of(7)), tensors_of(7))

    def test_tensors_are_writable_and_own_their_memory(self, store: Store) -> None:
        checkpoint = commit(store, run=RUN, step=1, parts=write_step(store, 1), metadata={})
        first = read_tensors(checkpoint, store, ["h.0.weight"])["h.0.weight"]
        first.add_(1)
        again = read_tensors(checkpoint, store, ["h.0.weight"])["h.0.weight"]
        assert torch.equal(first, again + 1)

    def test_nothing_is_visible_before_the_commit(self, store: Store) -> None:
        write_step(store, 1)
        assert latest(store, RUN) is None
        assert checkpoint_steps(store, RUN) == []

    def test_attempt_ids_are_used_once(self, store: Store) -> None:
        write_step(store, 1)
        with pytest.raises(CommitConflict, match="stage-0-a"):
            write_step(store, 1)

    def test_same_commit_again_is_fine(self, store: Store) -> None:
        parts = write_step(store, 1)
        first = commit(store, run=RUN, step=1, parts=parts, metadata={"x": 1})
        received = [Part.from_json(part.to_json()) for part in reversed(parts)]
        assert commit(store, run=RUN, step=1, parts=received, metadata={"x": 1}) == first

    def test_second_writer_of_a_step_is_told(self, store: Store) -> None:
        first = commit(store, run=RUN, step=1, parts=write_step(store, 1), metadata={})
        with pytest.raises(CommitConflict, match="checkpoint 1 of run run-1"):
            commit(store, run=RUN, step=1, parts=write_step(store, 1, attempt="late"), metadata={})
        assert latest(store, RUN) == first

    def test_of_four_racing_commits_exactly_one_wins(self, store: Store) -> None:
        attempts = [write_step(store, 1, attempt=f"w{number}") for number in range(4)]
        start = threading.Barrier(len(attempts))

        def attempt(parts: list[Part]) -> bool:
            start.wait(timeout=30)
            try:
                commit(store, run=RUN, step=1, parts=parts, metadata={})
            except CommitConflict:
                return False
            return True

        with ThreadPoolExecutor(len(attempts)) as pool:
            won = list(pool.map(attempt, attempts))
        assert won.count(True) == 1
        found = load_checkpoint(store, RUN, 1)
        assert list(found.parts) == attempts[won.index(True)]

    def test_tensor_in_two_parts_is_refused(self, store: Store) -> None:
        parts = [
            write_part(store, run=RUN, step=1, part=part, attempt="a", tensors={"w": torch.ones(2)})
            for part in ("stage-0", "stage-1")
        ]
        with pytest.raises(ValueError, match="tensor w is in two parts"):
            commit(store, run=RUN, step=1, parts=parts, metadata={})
        assert checkpoint_steps(store, RUN) == []

    def test_part_of_another_step_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="does not belong to step 2"):
            commit(store, run=RUN, step=2, parts=write_step(store, 1), metadata={})

    def test_commit_of_an_incomplete_part_is_refused(self, store: Store) -> None:
        parts = write_step(store, 1)
        lost = f"{parts[0].prefix}/h.0.weight/c.0.0"
        store.delete(lost)
        with pytest.raises(IntegrityError, match=lost):
            commit(store, run=RUN, step=1, parts=parts, metadata={})
        assert checkpoint_steps(store, RUN) == []

    def test_absent_checkpoint_lists_what_there_is(self, store: Store) -> None:
        commit(store, run=RUN, step=3, parts=write_step(store, 3), metadata={})
        with pytest.raises(NotFound, match=r"no checkpoint 4 of run run-1 .* there is: 3$"):
            load_checkpoint(store, RUN, 4)

    def test_absent_tensor_is_named(self, store: Store) -> None:
        checkpoint = commit(store, run=RUN, step=3, parts=write_step(store, 3), metadata={})
        with pytest.raises(NotFound, match=r"no tensor h\.9 in checkpoint 3"):
            read_tensors(checkpoint, store, ["h.9"])

    def test_reads_only_what_was_asked_for(self, store: Store) -> None:
        checkpoint = commit(store, run=RUN, step=1, parts=write_step(store, 1), metadata={})
        wanted = ["h.0.weight", "h.0.mask"]
        for part in checkpoint.parts:
            for key in part.files:
                if key.partition("/")[0] not in [*wanted, "zarr.json"]:
                    store.delete(f"{part.prefix}/{key}")
        expected = {name: tensors_of(1)[name] for name in wanted}
        assert_equal(read_tensors(checkpoint, store, wanted), expected)

    def test_collect_keeps_the_newest(self, store: Store) -> None:
        for step in (1, 2, 3, 4):
            commit(store, run=RUN, step=step, parts=write_step(store, step), metadata={})
        write_step(store, 2, attempt="abandoned")
        write_step(store, 3, attempt="abandoned")
        write_step(store, 4, attempt="lost-the-race")
        working = write_step(store, 5)
        assert collect(store, RUN, keep=2) == [1, 2]
        assert checkpoint_steps(store, RUN) == [3, 4]
        for step in (3, 4):
            checkpoint = load_checkpoint(store, RUN, step)
            assert_equal(read_tensors(checkpoint, store, tensors_of(step)), tensors_of(step))
        data = store.list(f"runs/{RUN}/data")
        assert {key.split("/")[3] for key in data} == {"00000003", "00000004", "00000005"}
        assert not [key for key in data if "abandoned" in key]
        commit(store, run=RUN, step=5, parts=working, metadata={})

    def test_collect_finishes_what_a_crash_left(self, store: Store) -> None:
        for step in (1, 2):
            commit(store, run=RUN, step=step, parts=write_step(store, step), metadata={})
        store.delete(f"runs/{RUN}/checkpoints/00000001.json")
        collect(store, RUN, keep=2)
        assert store.list(f"runs/{RUN}/data/00000001") == []
        assert checkpoint_steps(store, RUN) == [2]

    def test_collect_without_a_commit_removes_nothing(self, store: Store) -> None:
        write_step(store, 1)
        before = store.list()
        assert collect(store, RUN, keep=1) == []
        assert store.list() == before
        with pytest.raises(ValueError, match="at least one"):
            collect(store, RUN, keep=0)

    def test_steps_are_ordered_as_numbers(self, store: Store) -> None:
        for step in (100_000_000, 9):
            commit(store, run=RUN, step=step, parts=write_step(store, step), metadata={})
        assert checkpoint_steps(store, RUN) == [9, 100_000_000]
        newest = latest(store, RUN)
        assert newest is not None
        assert newest.step == 100_000_000


class RunContract:
    def test_record_round_trip(self, store: Store) -> None:
        record: dict[str, JSON] = {"seed": 1, "model": {"layers": [1, 2.5, None, "x", True]}}
        create_run(store, RUN, record)
        assert read_run(store, RUN) == record
        assert list_runs(store) == [RUN]

    def test_a_name_is_given_once_even_for_an_equal_record(self, store: Store) -> None:
        create_run(store, RUN, {"seed": 1})
        with pytest.raises(CommitConflict, match="run run-1"):
            create_run(store, RUN, {"seed": 1})

    def test_absent_run_lists_the_others(self, store: Store) -> None:
        create_run(store, "b", {})
        create_run(store, "a", {})
        store.put("runs/unborn/data/x", b"")
        with pytest.raises(NotFound, match=r"no run c in .* there is: a, b$"):
            read_run(store, "c")

    @pytest.mark.parametrize("name", ["", "A", "-a", "a/b", "..", "a" * 65, "a\n"])
    def test_bad_run_name(self, store: Store, name: str) -> None:
        with pytest.raises(ValueError, match="run name"):
            create_run(store, name, {})

    def test_record_of_another_run_is_refused(self, store: Store) -> None:
        create_run(store, "a", {})
        data = store.read("runs/a/run.json")
        assert data is not None
        store.put("runs/b/run.json", data)
        with pytest.raises(IntegrityError, match=r"runs/b/run\.json"):
            read_run(store, "b")

    def test_blob_round_trip(self, store: Store) -> None:
        put_blob(store, RUN, "tokenizer.json", b"content")
        put_blob(store, RUN, "tokenizer.json", b"content")
        put_blob(store, RUN, "empty", b"")
        assert get_blob(store, RUN, "tokenizer.json") == b"content"
        assert get_blob(store, RUN, "empty") == b""
        assert list_blobs(store, RUN) == ["empty", "tokenizer.json"]

    def test_blob_is_not_replaced(self, store: Store) -> None:
        put_blob(store, RUN, "plan", b"one")
        with pytest.raises(CommitConflict, match="blob plan"):
            put_blob(store, RUN, "plan", b"two")
        assert get_blob(store, RUN, "plan") == b"one"

    def test_absent_blob_lists_the_others(self, store: Store) -> None:
        put_blob(store, RUN, "plan", b"one")
        with pytest.raises(NotFound, match=r"no blob x of run run-1 .* there is: plan$"):
            get_blob(store, RUN, "x")

    def test_damaged_blob(self, store: Store) -> None:
        put_blob(store, RUN, "plan", b"one")
        (content,) = store.list(f"runs/{RUN}/blobs/data")
        store.put(content, b"two")
        with pytest.raises(IntegrityError, match=content):
            get_blob(store, RUN, "plan")
        store.delete(content)
        with pytest.raises(IntegrityError, match="it is missing"):
            get_blob(store, RUN, "plan")
