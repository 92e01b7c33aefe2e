"""`ThreadPublisher` on a connection whose server does not read: threads wait with their writes, the event loop does not."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.waiting import eventually
from weir.bus.links import folder
from weir.bus.links.link import LinkEnd, Sent
from weir.bus.nats.thread_publisher import ThreadPublisher

LARGE = b"x" * (16 << 20)
"""More than any socket takes without a reader."""


class LosableBus(CollectingBus):
    def on_loss(self, _listener: Callable[[], None]) -> None:
        pass


class Stalled:
    """A publisher, and the server's end of its connection."""

    def __init__(self) -> None:
        self.end, connection = socket.socketpair()
        connection.settimeout(30)
        self.end.settimeout(30)
        self.publisher = ThreadPublisher(LosableBus(), "test")  # type: ignore[arg-type]
        self.watching = asyncio.create_task(self.publisher._watch(connection))

    async def writing(self) -> asyncio.Task[None]:
        """A thread that waits with a large write, and holds the lock meanwhile."""
        writing = asyncio.create_task(asyncio.to_thread(self.publisher.publish, [("large", LARGE)]))
        while self.publisher._socket is None or not self.publisher._lock.locked():
            await asyncio.sleep(0.001)
        return writing

    def received(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and (more := self.end.recv(1 << 20)):
            data += more
        return bytes(data)


@pytest.fixture
async def stalled() -> AsyncIterator[Stalled]:
    made = Stalled()
    yield made
    made.end.close()
    made.watching.cancel()
    await made.publisher.close()


async def test_the_event_loop_does_not_wait_for_a_thread_that_writes(stalled: Stalled) -> None:
    writing = await stalled.writing()
    sent: list[int] = []
    stalled.publisher.publish([("small", b"1")], lambda: sent.append(1))
    stalled.publisher.publish([("small", b"2")], lambda: sent.append(2))
    stalled.end.sendall(b"PING\r\n")
    assert stalled.publisher._lock.locked(), "the thread still writes"
    assert sent == [], "who publishes is told when it is so"
    large = b"PUB large %d\r\n%s\r\n" % (len(LARGE), LARGE)
    tail = b"PUB small 1\r\n1\r\nPUB small 1\r\n2\r\n"
    data = await asyncio.to_thread(stalled.received, len(large) + len(tail) + len(b"PONG\r\n"))
    await writing
    while sent != [1, 2]:
        await asyncio.sleep(0.001)
    assert data.startswith(large)
    assert data[len(large) :].replace(b"PONG\r\n", b"") == tail, "in the order in which they were published"


async def test_the_event_loop_does_not_wait_for_the_server(stalled: Stalled) -> None:
    while stalled.publisher._socket is None:
        await asyncio.sleep(0)
    stalled.publisher.publish([("large", LARGE)])
    stalled.publisher.publish([("small", b"1")])
    # Nothing is read before this line: a loop that waited for the server would not get here.
    expected = b"PUB large %d\r\n%s\r\nPUB small 1\r\n1\r\n" % (len(LARGE), LARGE)
    assert await asyncio.to_thread(stalled.received, len(expected)) == expected


async def test_an_end_of_the_connection_frees_the_threads_that_write(stalled: Stalled) -> None:
    writing = await stalled.writing()
    stalled.publisher._ended.set()
    async with asyncio.timeout(10):
        await writing
        await stalled.watching


async def test_a_failed_write_ends_the_connection_that_the_event_loop_does_not_report(stalled: Stalled) -> None:
    """As after a reset: uvloop stops watching a socket with an error."""
    while (connection := stalled.publisher._socket) is None:
        await asyncio.sleep(0)
    asyncio.get_running_loop().remove_reader(connection)
    stalled.end.close()
    await asyncio.to_thread(stalled.publisher.publish, [("subject", b"1")])
    async with asyncio.timeout(10):
        await stalled.watching


async def test_a_completion_stays_behind_the_responses_that_a_lost_link_had_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its scheduler forgets the requests when it has the completion, and the worker may be killed at any moment."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setattr(folder, "SHARED_MEMORY_DIRECTORY", Path(place))
        worker, gateway, scheduler = LosableBus(), LosableBus(), LosableBus()
        worker.links.listen()
        publisher = ThreadPublisher(worker, "test")  # type: ignore[arg-type]
        for caller, subject in ((gateway, "reply.g"), (scheduler, "done.s")):
            caller.links.take(subject)
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
