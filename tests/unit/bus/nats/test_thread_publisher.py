"""`ThreadPublisher`: the order of what is published, and threads that wait while nats-server does not read."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.waiting import eventually
from weir.bus.links import folder
from weir.bus.links.link import LinkEnd, Sent
from weir.bus.nats import thread_publisher
from weir.bus.nats.thread_publisher import MAX_QUEUED_BYTES, MAX_UNSENT_BYTES, ThreadPublisher

LARGE = bytes(1 << 20)


class SlowBus(CollectingBus):
    """Its server reads nothing until `unsent_bytes` is set to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent_bytes = MAX_UNSENT_BYTES + 1
        self.publisher = ThreadPublisher(self)  # type: ignore[arg-type]

    def order(self) -> list[str]:
        return [subject for subject, _, _ in self.published]


@pytest.fixture
async def bus() -> SlowBus:
    return SlowBus()


async def test_messages_of_a_thread_and_of_the_event_loop_stay_in_order(bus: SlowBus) -> None:
    bus.unsent_bytes = 0
    sent: list[int] = []

    def publish(start: int) -> None:
        for number in range(start, start + 100):
            bus.publisher.publish(
                [(f"{number}", b"1"), (f"{number} too", b"2")], lambda number=number: sent.append(number)
            )

    thread = threading.Thread(target=publish, args=(0,))
    thread.start()
    thread.join()  # so the event loop has written nothing yet
    publish(100)
    await eventually(lambda: len(sent) == 200)
    assert bus.order() == [subject for number in range(200) for subject in (f"{number}", f"{number} too")]
    assert sent == list(range(200))


async def test_what_the_event_loop_publishes_leaves_at_once(bus: SlowBus) -> None:
    bus.unsent_bytes = 0
    sent: list[bool] = []
    bus.publisher.publish([("a", b"1")], lambda: sent.append(True))
    assert (bus.order(), sent) == (["a"], [True])


async def test_a_thread_waits_while_the_server_does_not_read_and_the_event_loop_does_not(
    bus: SlowBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_publisher, "MAX_WAIT_S", 600)
    count, queued = 4 * MAX_QUEUED_BYTES // len(LARGE), bus.publisher

    def publish() -> None:
        for number in range(count):
            queued.publish([(f"{number}", LARGE)])

    publishing = asyncio.create_task(asyncio.to_thread(publish))
    await eventually(lambda: queued._queued_bytes >= MAX_QUEUED_BYTES)
    sent: list[bool] = []
    queued.publish([("of the loop", b"")], lambda: sent.append(True))
    assert queued._queued_bytes == MAX_QUEUED_BYTES, "the thread has not queued more"
    assert not sent
    assert not bus.published
    bus.unsent_bytes = 0
    await publishing
    await eventually(lambda: len(bus.published) == count + 1)
    order = bus.order()
    assert order.index("of the loop") == MAX_QUEUED_BYTES // len(LARGE)
    order.remove("of the loop")
    assert order == [f"{number}" for number in range(count)]
    assert sent


async def test_a_server_that_never_reads_does_not_hold_a_thread(bus: SlowBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_publisher, "MAX_WAIT_S", 0.01)
    size = MAX_QUEUED_BYTES // 2
    for number in range(4):
        await asyncio.to_thread(bus.publisher.publish, [(f"{number}", bytes(size))])
    assert not bus.published
    bus.unsent_bytes = 0
    await eventually(lambda: bus.order() == ["0", "1", "2", "3"])


async def test_nothing_waits_for_a_server_that_is_away(bus: SlowBus) -> None:
    """The `Bus` keeps what is published meanwhile, up to a bound."""
    bus.is_connected = False
    bus.publisher.publish([("a", b"1")])
    assert bus.order() == ["a"]


async def test_a_message_that_can_not_be_published_does_not_affect_others(bus: SlowBus) -> None:
    bus.unsent_bytes = 0
    publish = bus.publish_to_broker

    def fail_first(subject: str, data: bytes, reply: str = "") -> None:
        if subject == "first":
            raise ValueError(subject)
        publish(subject, data, reply)

    bus.publish_to_broker = fail_first  # type: ignore[method-assign]
    sent: list[bool] = []
    bus.publisher.publish([("first", b""), ("second", b"")], lambda: sent.append(True))
    assert (bus.order(), sent) == (["second"], [True])


async def test_a_completion_stays_behind_the_responses_that_a_lost_link_had_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its scheduler forgets the requests when it has the completion, and the worker may be killed at any moment."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setattr(folder, "SHARED_MEMORY_DIRECTORY", Path(place))
        worker, gateway, scheduler = CollectingBus(), CollectingBus(), CollectingBus()
        worker.links.listen()
        publisher = ThreadPublisher(worker)  # type: ignore[arg-type]
        for caller, subject in ((gateway, "reply.g"), (scheduler, "done.s")):
            caller.links.take(subject, lambda message: None)
            caller.links.connect("w", worker.links.address, ())
        worker.links.accept_waiting()
        link = worker.links.route("reply.g")
        assert link is not None
        # The gateway reads nothing.
        asyncio.get_running_loop().remove_reader(gateway.links._links["w"].link._socket)
        while link.send([("reply.g", bytes(100_000))]) is Sent.WRITTEN:
            pass
        sent: list[bool] = []
        publisher.send([("reply.g", b"response")], [("done.s", b"completion")], lambda: sent.append(True))
        assert not sent
        link._end(LinkEnd.BROKEN_OFF)
        await eventually(lambda: len(worker.published) == 3)
        assert [(subject, data[:10]) for subject, data, _ in worker.published] == [
            ("reply.g", bytes(10)),
            ("reply.g", b"response"),
            ("done.s", b"completion"),
        ]
        assert sent
        assert not scheduler.links.received
        for bus in (gateway, scheduler, worker):
            bus.links.close()
