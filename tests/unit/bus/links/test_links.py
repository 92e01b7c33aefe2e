"""Links between processes, here in one: what goes through them, and what becomes of messages when they end."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.bus.links import folder, link, links
from weir.bus.links.framing import HEADER, Outgoing, pack_frames, pack_subjects
from weir.bus.links.link import Link, LinkEnd, Sent
from weir.bus.links.links import Links
from weir.bus.message import Message
from weir.bus.turn import Turn

TAKEN = ("work.w", "release.w")


class Process:
    """The bus of one process, with its links. `published` went to the broker."""

    def __init__(self, *own: str) -> None:
        self.published: list[tuple[str, bytes]] = []
        self.received: list[tuple[str, bytes]] = []
        self.ends: list[tuple[str, LinkEnd]] = []
        self.links = Links(self.publish, Turn())
        self.links.on_lost(lambda peer, end: self.ends.append((peer, end)))
        for subject in own:
            self.take(subject)

    def take(self, subject: str) -> None:
        self.links.take(subject, lambda message: self.received.append((message.subject, message.data)))

    def publish(self, subject: str, data: bytes) -> None:
        if not self.links.send(subject, data):
            self.published.append((subject, data))


class Pair:
    """A caller that has connected to a worker."""

    def __init__(self) -> None:
        self.worker = Process(*TAKEN)
        self.worker.links.listen()
        self.caller = Process("reply.g", "done.s")
        self.caller.links.connect("w", self.worker.links.address, TAKEN)

    def close(self) -> None:
        self.caller.links.close()
        self.worker.links.close()

    def opened(self) -> Link:
        found = self.caller.links.route("work.w")
        assert found is not None
        return found

    def accepted(self) -> Link:
        self.worker.links.accept_waiting()
        found = self.worker.links.route("reply.g")
        assert found is not None
        return found


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sockets, at a short path: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setattr(folder, "SHARED_MEMORY_DIRECTORY", Path(place))
        yield Path(place, f"weir-links-{os.getuid()}")


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.close()


async def test_a_message_to_a_linked_process_does_not_go_to_the_broker(pair: Pair) -> None:
    pair.caller.publish("work.w", b"batch")
    pair.caller.publish("work.other", b"batch")
    await eventually(lambda: pair.worker.received == [("work.w", b"batch")])
    assert pair.caller.published == [("work.other", b"batch")]
    pair.worker.publish("reply.g", b"response")
    pair.worker.publish("done.s", b"completion")
    await eventually(lambda: pair.caller.received == [("reply.g", b"response"), ("done.s", b"completion")])
    assert pair.worker.published == []


async def test_a_worker_has_the_link_of_a_caller_before_its_first_message(pair: Pair) -> None:
    assert pair.accepted().send([("reply.g", b"1")]) is Sent.WRITTEN, "nothing has run in the event loop yet"


async def test_a_subject_that_is_taken_later_is_announced(pair: Pair) -> None:
    pair.caller.take("reply.later")
    await eventually(lambda: pair.worker.links.route("reply.later") is not None)


async def test_threads_send_in_order_and_large_messages_arrive_whole(pair: Pair) -> None:
    route, count, large = pair.accepted(), 200, b"x" * 300_000

    def send(thread: int) -> None:
        for number in range(count):
            route.send([("reply.g", f"{thread} {number} ".encode()), ("done.s", large if number % 50 == 0 else b"")])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    await eventually(lambda: len(pair.caller.received) == 2 * 3 * count)
    for thread in threads:
        thread.join()
    texts = [data.decode().split() for subject, data in pair.caller.received if subject == "reply.g"]
    for thread in range(3):
        assert [int(number) for of, number in texts if of == str(thread)] == list(range(count))
    assert sum(len(data) == len(large) for _, data in pair.caller.received) == 3 * 4


async def test_a_process_that_ends_says_so(pair: Pair) -> None:
    pair.accepted()
    pair.worker.links.close()
    await eventually(lambda: pair.caller.ends == [("w", LinkEnd.ORDERLY)])
    pair.caller.publish("release.w", b"")
    assert pair.caller.published == [("release.w", b"")]
    assert not pair.caller.links.has_link("w")


def stop_listening(process: Process) -> None:
    """Closes the socket of a process that has been killed."""
    assert process.links._listener is not None
    asyncio.get_running_loop().remove_reader(process.links._listener)
    process.links._listener.close()
    process.links._listener = None


async def test_a_killed_process_is_noticed_and_what_it_wrote_arrives(pair: Pair) -> None:
    route = pair.accepted()
    route.send([("reply.g", b"last")])
    stop_listening(pair.worker)
    route._socket.shutdown(socket.SHUT_RDWR)  # as the kernel does
    await eventually(lambda: pair.caller.ends == [("w", LinkEnd.LOST)])
    assert pair.caller.received == [("reply.g", b"last")]


async def test_a_half_written_frame_is_not_delivered(pair: Pair) -> None:
    route = pair.accepted()
    route._socket.send(pack_frames([("reply.g", b"whole"), ("reply.g", b"half")])[:-2])
    route._socket.shutdown(socket.SHUT_RDWR)
    await eventually(lambda: bool(pair.caller.ends))
    assert pair.caller.received == [("reply.g", b"whole")]


async def test_a_failed_write_does_not_discard_what_the_process_sent_before_its_death(pair: Pair) -> None:
    """The caller releases a slot before it reads the last responses of a worker that was killed."""
    route = pair.accepted()
    assert route.send([("reply.g", bytes(200_000)), ("reply.g", b"last")]) is Sent.WRITTEN
    stop_listening(pair.worker)
    route._socket.shutdown(socket.SHUT_RDWR)
    opened = pair.opened()
    assert opened.send([("release.w", b"slot")]) is Sent.BUFFERED
    await eventually(lambda: bool(pair.caller.ends))
    assert [len(data) for _, data in pair.caller.received] == [200_000, 4]
    assert pair.caller.ends == [("w", LinkEnd.LOST)]
    assert pair.caller.published == [("release.w", b"slot")]


def kill(killed: Link) -> None:
    """Ends the link as the kernel does when the process at this end is killed."""
    asyncio.get_running_loop().remove_reader(killed._socket)
    killed._phase, killed._has_ended = link._Phase.ENDED, True
    killed._socket.close()


async def test_the_death_of_a_process_that_had_not_read_everything_is_noticed(pair: Pair) -> None:
    """The socket then has an error, and uvloop stops watching it although there is more to read."""
    route = pair.accepted()
    assert pair.opened().send([("release.w", b"unread")]) is Sent.WRITTEN
    assert route.send([("reply.g", bytes(200_000)), ("reply.g", b"last")]) is Sent.WRITTEN
    stop_listening(pair.worker)
    kill(route)
    await eventually(lambda: pair.caller.ends == [("w", LinkEnd.LOST)])
    assert [len(data) for _, data in pair.caller.received] == [200_000, 4]


async def test_a_write_to_a_process_that_died_before_it_read_everything_ends_the_link(pair: Pair) -> None:
    """What was not written goes to the broker, and the completions that wait for it go on."""
    route, written = pair.accepted(), list[bool]()

    def respond(_message: Message) -> None:
        assert route.send([("reply.g", b"response")]) is Sent.BUFFERED
        route.when_written(written.append)

    pair.worker.links.take("release.w", respond)
    assert route.send([("reply.g", b"unread")]) is Sent.WRITTEN
    assert pair.opened().send([("release.w", b"last")]) is Sent.WRITTEN
    kill(pair.opened())
    await eventually(lambda: written == [False])
    assert pair.worker.published == [("reply.g", b"response")]
    assert pair.worker.links.route("reply.g") is None


async def test_a_link_that_is_broken_off_while_a_thread_writes_is_reported_as_broken_off(pair: Pair) -> None:
    """Its caller sends pending requests again: it has not read all responses."""
    opened, ready = pair.opened(), threading.Event()
    packed = opened._packed

    def pack_slowly(messages: Sequence[Outgoing]) -> bytes:
        ready.set()
        assert ended.wait(10)
        return packed(messages)

    ended = threading.Event()
    opened._packed = pack_slowly  # type: ignore[method-assign]
    sending = asyncio.create_task(asyncio.to_thread(opened.send, [("release.w", b"slot")]))
    await eventually(ready.is_set)
    opened._end(LinkEnd.BROKEN_OFF)
    ended.set()
    await sending
    await eventually(lambda: pair.caller.ends == [("w", LinkEnd.BROKEN_OFF)])
    assert pair.caller.published == [("release.w", b"slot")]


async def test_a_process_that_does_not_read_gets_its_messages_from_the_broker(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a caller that was stopped: nothing is lost, none is sent twice, and others do not wait for it."""
    route = pair.accepted()
    monkeypatch.setattr(route, "_stall_limit_s", 0.1)
    asyncio.get_running_loop().remove_reader(pair.opened()._socket)
    numbers = 0
    while route.send([("reply.g", b"%8d" % numbers + bytes(100_000))]) is Sent.WRITTEN:
        numbers += 1
    route.send([("reply.g", b"behind")])
    waiting: list[bool] = []
    route.when_written(waiting.append)
    assert not waiting
    await eventually(lambda: waiting == [False])
    published = [data[:8] for _, data in pair.worker.published]
    assert published == [b"%8d" % numbers, b"behind"], "the message that was written in part, and those behind it"
    asyncio.get_running_loop().add_reader(pair.opened()._socket, pair.opened()._read)
    await eventually(lambda: bool(pair.caller.ends))
    assert [int(data[:8]) for _, data in pair.caller.received] == list(range(numbers))


async def test_what_threads_send_while_a_link_ends_goes_behind_what_it_had_not_sent(pair: Pair) -> None:
    """Responses of a stream would overtake each other otherwise."""
    route = pair.accepted()
    asyncio.get_running_loop().remove_reader(pair.opened()._socket)
    while route.send([("reply.g", bytes(100_000))]) is Sent.WRITTEN:
        pass
    published: list[bytes] = []

    def publish(messages: Sequence[Outgoing]) -> None:
        if not published:
            assert route.send([("reply.g", b"later")]) is Sent.BUFFERED
        published.extend(data for _, data in messages)

    pair.worker.links.send_unsent = publish
    route.send([("reply.g", b"behind")])
    route._end(LinkEnd.BROKEN_OFF)
    assert [len(data) for data in published] == [100_000, 6, 5]
    assert route.send([("reply.g", b"")]) is Sent.REJECTED


async def test_a_process_that_reads_too_slowly_is_disconnected(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_BUFFERED_BYTES", 1 << 20)
    route = pair.accepted()
    asyncio.get_running_loop().remove_reader(pair.opened()._socket)
    for _ in range(60):
        route.send([("reply.g", bytes(100_000))])
    await eventually(lambda: pair.worker.links.route("reply.g") is None)
    assert route.send([("reply.g", b"")]) is Sent.REJECTED
    assert pair.worker.published


async def test_the_batches_of_a_lost_link_are_not_sent_again(pair: Pair) -> None:
    """Their scheduler treats the worker as lost, and runs them again."""
    opened = pair.opened()
    asyncio.get_running_loop().remove_reader(pair.accepted()._socket)
    while opened.send([("work.w", bytes(100_000)), ("release.w", b"slots")]) is Sent.WRITTEN:
        pass
    stop_listening(pair.worker)
    opened._end(LinkEnd.LOST)
    assert {subject for subject, _ in pair.caller.published} == {"release.w"}


async def test_a_link_that_was_cut_is_opened_again_and_has_what_was_not_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order: the next request of a sequence may follow from the one before."""
    monkeypatch.setattr(links, "REOPEN_INTERVAL_S", 0.0)
    route, opened = pair.accepted(), pair.opened()
    asyncio.get_running_loop().remove_reader(route._socket)
    count = 0
    while opened.send([("work.w", b"%8d" % count + bytes(100_000))]) is Sent.WRITTEN:
        count += 1
    opened.send([("work.w", b"%8d" % (count + 1)), ("release.w", b"slots")])
    opened._socket.shutdown(socket.SHUT_RDWR)
    await eventually(lambda: pair.caller.ends == [("w", LinkEnd.CUT)])
    assert pair.opened() is not opened
    pair.caller.publish("work.w", b"%8d" % (count + 2))
    # Only now the worker reads: the new link before the old one.
    await eventually(lambda: pair.worker.links.route("reply.g") not in (None, route))
    await eventually(lambda: pair.worker.received[-1][1] == b"%8d" % (count + 2))
    assert [int(data[:8]) for subject, data in pair.worker.received if subject == "work.w"] == list(range(count + 3))
    assert ("release.w", b"slots") in pair.worker.received
    assert not pair.caller.published
    pair.worker.publish("done.s", b"completion")
    await eventually(lambda: pair.caller.received == [("done.s", b"completion")])


async def test_a_worker_that_rejects_links_is_not_asked_again_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    connects: list[str] = []
    connect = folder.connect

    def count(address: str) -> socket.socket:
        connects.append(address)
        return connect(address)

    monkeypatch.setattr(folder, "connect", count)
    monkeypatch.setattr(links, "MAX_LINKS", 0)
    pair.accepted()._end(LinkEnd.BROKEN_OFF)
    await eventually(lambda: pair.caller.ends == [("w", LinkEnd.CUT)])
    assert len(connects) == 1, "whether it still listens"
    assert not pair.caller.links.has_link("w")
    pair.caller.publish("work.w", b"batch")
    assert pair.caller.published == [("work.w", b"batch")]


async def test_a_link_that_is_cut_soon_is_opened_again_later(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REOPEN_INTERVAL_S", 0.2)
    for _ in range(3):
        former = pair.opened()
        former._socket.shutdown(socket.SHUT_RDWR)
        await eventually(lambda former=former: pair.caller.links.route("work.w") not in (None, former))
    pair.caller.publish("work.w", b"batch")
    await eventually(lambda: pair.worker.received == [("work.w", b"batch")])
    assert pair.caller.ends == [("w", LinkEnd.CUT)] * 3
    pair.worker.publish("reply.g", b"response")
    await eventually(lambda: pair.caller.received == [("reply.g", b"response")])


async def test_bytes_that_are_no_frame_end_the_link(pair: Pair) -> None:
    pair.accepted()._socket.send(HEADER.pack(0, 9))
    await eventually(lambda: pair.caller.ends == [("w", LinkEnd.BROKEN_OFF)])


async def test_only_subjects_of_callers_and_schedulers_are_routed(pair: Pair) -> None:
    pair.opened()._socket.send(pack_frames([("", pack_subjects(["$KV.registry.w", "statistics.query", "reply.ok"]))]))
    await eventually(lambda: pair.worker.links.route("reply.ok") is not None)
    assert pair.worker.links.route("$KV.registry.w") is None
    assert pair.worker.links.route("statistics.query") is None


async def test_a_message_on_a_subject_that_the_process_does_not_take_is_dropped(pair: Pair) -> None:
    pair.opened().send([("settings", b"x"), ("work.w", b"batch")])
    await eventually(lambda: bool(pair.worker.received))
    assert pair.worker.received == [("work.w", b"batch")]


@pytest.mark.parametrize("address", ["2-0123456789abcdef", "../../socket", "1-0123456789abcdef", "x"])
async def test_without_a_listener_or_with_another_version_there_is_no_link(address: str) -> None:
    caller = Process("reply.g")
    caller.links.connect("w", address, TAKEN)
    caller.publish("work.w", b"")
    assert caller.published == [("work.w", b"")]


async def test_a_process_that_takes_no_messages_opens_no_link(pair: Pair) -> None:
    observer = Process()
    observer.links.connect("w", pair.worker.links.address, TAKEN)
    assert not observer.links.has_link("w")


def sockets(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


async def test_sockets_of_killed_processes_are_removed(own_folder: Path) -> None:
    worker, other = Process(*TAKEN), Process(*TAKEN)
    worker.links.listen()
    stop_listening(worker)
    assert sockets(own_folder) == [worker.links.address]
    other.links.listen()
    assert sockets(own_folder) == [other.links.address]
    other.links.close()
    assert not sockets(own_folder)


async def test_a_folder_that_others_may_enter_is_not_used(own_folder: Path) -> None:
    os.mkdir(own_folder)
    os.chmod(own_folder, 0o755)
    worker = Process(*TAKEN)
    worker.links.listen()
    assert worker.links.address == ""
