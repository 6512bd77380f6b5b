"""The outbox: waits, answers again, drops what has been received, ends an attempt."""

import threading

import pytest
import torch

from fusion_dask.errors import NeighbourFailed
from fusion_dask.worker.outbox import BoundaryKey, Channel, Outbox

CHANNEL = Channel("run", 1, "activation", 0, 1)


def _key(step: int, microbatch: int, epoch: int = 1) -> BoundaryKey:
    return BoundaryKey(CHANNEL._replace(epoch=epoch), step, microbatch)


def test_a_question_waits_for_its_tensor() -> None:
    outbox = Outbox()
    future = outbox.ask(_key(0, 0), None)
    assert not future.done()

    tensor = torch.ones(2)
    threading.Thread(target=outbox.publish, args=(_key(0, 0), [tensor])).start()

    assert future.result(10)[0] is tensor


def test_a_lost_answer_can_be_asked_for_again() -> None:
    outbox = Outbox()
    outbox.publish(_key(0, 0), [torch.ones(1)])
    first = outbox.ask(_key(0, 0), None).result(0)
    assert outbox.ask(_key(0, 0), None).result(0) is first


def test_publishing_twice_keeps_the_first() -> None:
    outbox = Outbox()
    outbox.publish(_key(0, 0), [torch.ones(1)])
    outbox.publish(_key(0, 0), [torch.zeros(1)])
    assert float(outbox.ask(_key(0, 0), None).result(0)[0]) == 1.0


def test_what_was_received_is_dropped_and_nothing_else() -> None:
    outbox = Outbox()
    for microbatch in range(4):
        outbox.publish(_key(0, microbatch), [torch.ones(1)])
    outbox.ask(_key(0, 3), (0, 1))
    assert len(outbox) == 2

    other = BoundaryKey(CHANNEL._replace(kind="gradient"), 0, 0)
    outbox.publish(other, [torch.ones(1)])
    outbox.ask(_key(1, 0), (0, 3))
    assert len(outbox) == 1


def test_an_ended_attempt_answers_with_its_error_now_and_later() -> None:
    outbox = Outbox()
    waiting = outbox.ask(_key(0, 0), None)
    outbox.check("run", 1)

    outbox.fail("run", 1, NeighbourFailed(2, "no more power"))

    for future in (waiting, outbox.ask(_key(0, 1), None)):
        with pytest.raises(NeighbourFailed, match="no more power"):
            future.result(0)
    with pytest.raises(NeighbourFailed):
        outbox.check("run", 1)
    outbox.check("run", 2)


def test_a_newer_attempt_never_sees_what_an_older_one_made() -> None:
    outbox = Outbox()
    outbox.publish(_key(0, 0, epoch=1), [torch.ones(1)])
    assert not outbox.ask(_key(0, 0, epoch=2), None).done()

    outbox.drop("run", 2)

    assert len(outbox) == 0
