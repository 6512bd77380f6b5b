"""The directory: a pure record of where stages are."""

from fusion_dask.broker.directory import Directory


def test_a_stage_is_where_it_was_placed_until_its_worker_is_lost() -> None:
    directory = Directory().placed("r", 1, {0: "a", 1: "b"}).placed("s", 1, {0: "b"})

    after = directory.worker_lost("b", "power")

    assert (after.where("r", 1, 0), after.where("r", 1, 1)) == ("a", None)
    assert after.lost("r") == {1: "power"}
    assert after.lost("s") == {0: "power"}
    assert directory.lost("r") == {}  # an event gives a new directory


def test_only_the_newest_attempt_is_answered() -> None:
    directory = Directory().placed("r", 2, {0: "a"})
    assert directory.placed("r", 1, {0: "z"}) is directory
    assert directory.where("r", 1, 0) is None
    assert directory.placed("r", 3, {0: "c"}).where("r", 3, 0) == "c"


def test_a_new_attempt_forgets_old_losses_and_release_forgets_all() -> None:
    directory = Directory().placed("r", 1, {0: "a"}).worker_lost("a", "power")
    assert directory.placed("r", 2, {0: "b"}).lost("r") == {}
    assert directory.released("r") == Directory()
