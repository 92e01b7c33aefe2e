"""A worker takes no batch of an owner that another has followed."""

from __future__ import annotations

import pytest
from collecting_bus import CollectingBus

from schemas.messages import BatchMessage
from schemas.ownership import QueueOwner, pack_queue_owner, unpack_queue_owner
from schemas.wire import WIRE_VERSION, MalformedMessage, pack
from worker import queue_epochs
from worker.queue_epochs import QueueEpochs


def batch(scheduler: str, epoch: int, model: str = "m", partition: int = 0) -> BatchMessage:
    return BatchMessage(scheduler, 1, model, 1, 0, [], [], False, epoch, partition)


async def test_what_an_earlier_owner_sends_is_refused() -> None:
    bus, epochs = CollectingBus(), QueueEpochs()
    await epochs.start(bus)  # type: ignore[arg-type]
    assert epochs.later_than(batch("a", 5)) == 0
    assert epochs.later_than(batch("a", 5)) == 0
    assert epochs.later_than(batch("b", 5)) == 5, "one of them has read no record"
    bus.deliver("owner.*", pack_queue_owner(QueueOwner("m", 0, "b", 7)))
    assert epochs.later_than(batch("a", 5)) == 7
    assert epochs.later_than(batch("a", 5, partition=1)) == 0, "another queue"
    assert epochs.later_than(batch("b", 7)) == 0
    assert epochs.later_than(batch("b", 9)) == 0
    assert epochs.later_than(batch("b", 7)) == 9
    assert epochs.later_than(batch("b", 0)) == 0, "of a scheduler that knows of no epochs"
    bus.deliver("owner.*", pack_queue_owner(QueueOwner("m", 0, "a", 5)))
    assert epochs.later_than(batch("b", 9)) == 0
    bus.deliver("owner.*", b"nonsense")
    assert (epochs.refused, epochs.malformed_messages) == (3, 1)


def test_they_do_not_grow_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_epochs, "MAX_QUEUES", 3)
    epochs = QueueEpochs()
    for number in range(9):
        epochs.later_than(batch("a", 5, f"m{number}"))
    assert len(epochs._owners) == 3


@pytest.mark.parametrize(
    "row",
    [
        ("m", 0, "a", "5"),
        ("m", -1, "a", 5),
        ("m", 0, "a.b", 5),
        ("m", 0, "a", -1),
        (7, 0, "a", 5),
        ("m", 0, None, 5),
        ("m", 0, "a", 1 << 60),
    ],
)
def test_a_record_that_is_none(row: tuple[object, ...]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_queue_owner(bytes(pack((WIRE_VERSION, *row))))
