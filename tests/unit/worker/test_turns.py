"""Turns: one at a time, and nobody waits for one who has gone."""

import threading
from pathlib import Path

from fusion_dask.worker.turns import turn


def test_two_take_turns(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            with turn(tmp_path / "lock", threading.Event()):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 40
    assert set(most) == {1}


def test_one_who_has_ended_does_not_wait(tmp_path: Path) -> None:
    ended = threading.Event()
    ended.set()
    with turn(tmp_path / "lock", threading.Event()), turn(tmp_path / "lock", ended):
        pass
