"""Producers, and the owner of a queue, as separate processes.

Producers store messages singly or in atomic batches, of which all or none are stored.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.headers import pack_headers
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck
from weir.bus.streams.pull import StandingPull

_LEAST_ATOMIC = 16
"""Fewer are cheaper one by one."""


@dataclass(frozen=True, kw_only=True)
class Flood:
    """`count` times `body` to `subject` with ids that begin with `prefix`, `in_flight` of them unacknowledged.

    `atomic`: so many at a time, all or none of which are stored; 0 for each alone.
    """

    url: str
    prefix: str
    subject: str
    body: bytes
    headers: tuple[tuple[str, str], ...]
    count: int
    in_flight: int
    atomic: int = 0


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds that a process took, and of CPU."""

    seconds: float
    cpu_s: float


class Worker:
    """A process that says when it is ready, begins when it is told to, and then says what it has spent."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        processes = multiprocessing.get_context("spawn")
        self._pipe, there = processes.Pipe()
        self.process = processes.Process(target=target, args=(*arguments, there), daemon=True)
        self.process.start()
        there.close()
        self._pipe.recv()

    def go(self) -> None:
        """Lets it begin."""
        self._pipe.send(True)

    def is_done(self) -> bool:
        """Whether it has finished."""
        return self._pipe.poll()

    def spent(self) -> Spent:
        """Waits for its end."""
        spent: Spent = self._pipe.recv()
        self.process.join()
        return spent


def producer(flood: Flood) -> Worker:
    """A process that publishes."""
    return Worker(_produce, flood)


def owner(url: str, stream: str, consumer: str, result_subject: str, count: int, atomic: int) -> Worker:
    """A process that takes `count` messages from a consumer, stores a record of each, and acknowledges it.

    With `atomic` so many at a time; those are not acknowledged but removed, all up to one at once.
    """
    return Worker(_own, url, stream, consumer, result_subject, count, atomic)


def _produce(flood: Flood, pipe: Connection) -> None:
    uvloop.run(_publish_all(flood, pipe))


def _own(url: str, stream: str, consumer: str, result_subject: str, count: int, atomic: int, pipe: Connection) -> None:
    uvloop.run(_answer_all(url, stream, consumer, result_subject, count, atomic, pipe))


class _Stores:
    """Stores messages singly or in atomic batches; `on_stored` is called once for each that is stored."""

    def __init__(self, bus: Bus, name: str, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._name = name
        self._publisher = publisher
        self._batches = 0
        self._waiting: dict[str, Callable[[StoreAck], None]] = {}

    async def start(self) -> None:
        await self._bus.subscribe(f"batches.{self._name}.*", self._on_commit)

    def single(self, subject: str, body: bytes, headers: list[tuple[str, str]], done: Callable[[], None]) -> None:
        self._publisher.publish(subject, body, pack_headers(headers), lambda ack: _stored(ack, done))

    def batch(self, messages: list[tuple[str, bytes, list[tuple[str, str]]]], done: Callable[[], None]) -> None:
        self._batches += 1
        id = f"{self._name}-{self._batches}"
        reply = f"batches.{self._name}.{self._batches}"
        self._waiting[reply] = lambda ack: _stored(ack, done)
        for number, (subject, body, headers) in enumerate(messages, 1):
            is_last = number == len(messages)
            more = [("Nats-Batch-Id", id), ("Nats-Batch-Sequence", str(number))]
            more += [("Nats-Batch-Commit", "1")] * is_last
            self._bus.publish(subject, body, reply if is_last else "", pack_headers([*headers, *more]))

    def _on_commit(self, message: Message) -> None:
        error = message.status or (message.data if b'"error"' in message.data else b"")
        self._waiting.pop(message.subject)(StoreAck(error_code=1, description=str(error)) if error else StoreAck(1))


def _stored(ack: StoreAck, done: Callable[[], None]) -> None:
    if not ack.is_stored:
        raise SystemExit(f"not stored: {ack}")
    done()


async def _connected(url: str, name: str, background: asyncio.TaskGroup) -> tuple[Bus, AckedPublisher, _Stores]:
    bus = await Bus.connect(url, name, background)
    publisher = AckedPublisher(bus, name)
    await publisher.start(background)
    stores = _Stores(bus, name, publisher)
    await stores.start()
    await bus.flush()
    return bus, publisher, stores


async def _publish_all(flood: Flood, pipe: Connection) -> None:
    async with asyncio.TaskGroup() as background:
        bus, publisher, stores = await _connected(flood.url, flood.prefix, background)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        at_once = flood.atomic or 1
        published = stored = 0

        def message() -> tuple[str, bytes, list[tuple[str, str]]]:
            nonlocal published
            published += 1
            return flood.subject, flood.body, [("Nats-Msg-Id", f"{flood.prefix}-{published}"), *flood.headers]

        def publish() -> None:
            size = min(at_once, flood.count - published)
            if flood.atomic and size:
                stores.batch([message() for _ in range(size)], lambda: on_stored(size))
            elif size:
                stores.single(*message(), lambda: on_stored(1))

        def on_stored(size: int) -> None:
            nonlocal stored
            stored += size
            publish()
            if stored == flood.count:
                done.set_result(None)

        pipe.send(True)
        await asyncio.to_thread(pipe.recv)
        began_s, cpu_s = time.monotonic(), time.process_time()
        for _ in range(max(1, flood.in_flight // at_once)):
            publish()
        await done
        pipe.send(Spent(seconds=time.monotonic() - began_s, cpu_s=time.process_time() - cpu_s))
        publisher.stop()
        await bus.close()


async def _answer_all(
    url: str, stream: str, consumer: str, result_subject: str, count: int, atomic: int, pipe: Connection
) -> None:
    async with asyncio.TaskGroup() as background:
        bus, publisher, stores = await _connected(url, "owner", background)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arrived: deque[tuple[bytes, str]] = deque()
        acknowledged = removed = 0
        finished: set[int] = set()
        expected = ("Nats-Expected-Last-Subject-Sequence", "0")

        def record(data: bytes, ack_subject: str) -> tuple[str, bytes, list[tuple[str, str]]]:
            return f"{result_subject}.{ack_subject.split('.')[5]}", data, [expected]

        def on_stored(ack_subjects: list[str]) -> None:
            nonlocal acknowledged
            acknowledged += len(ack_subjects)
            if atomic:
                finished.update(int(ack_subject.split(".")[5]) for ack_subject in ack_subjects)
                remove()
                return
            for ack_subject in ack_subjects:
                pull.ack(ack_subject)
            if acknowledged == count:
                done.set_result(None)

        def remove() -> None:
            # A server that syncs does so for each acknowledgement, but once for all that are removed together.
            nonlocal removed
            upto = removed
            while upto + 1 in finished:
                upto += 1
            if upto - removed >= atomic or upto == count:
                finished.difference_update(range(removed + 1, upto + 1))
                removed = upto
                asked = json.dumps({"seq": upto + 1}).encode()
                bus.publish(f"$JS.API.STREAM.PURGE.{stream}", asked, "owner-removed" if upto == count else "")

        def deliver(data: bytes, ack_subject: str) -> None:
            if not atomic:
                stores.single(*record(data, ack_subject), lambda: on_stored([ack_subject]))
                return
            if not arrived:
                bus.defer(flush)
            arrived.append((data, ack_subject))

        def flush() -> None:
            while arrived:
                if len(arrived) < _LEAST_ATOMIC:
                    data, ack_subject = arrived.popleft()
                    stores.single(*record(data, ack_subject), lambda ack_subject=ack_subject: on_stored([ack_subject]))
                    continue
                some = [arrived.popleft() for _ in range(min(atomic, len(arrived)))]
                stores.batch([record(*one) for one in some], lambda some=some: on_stored([one[1] for one in some]))

        pull = StandingPull(bus, stream, consumer, lambda message: deliver(message.data, message.reply))
        await bus.subscribe("owner-inbox", pull.receive)
        await bus.subscribe("owner-removed", lambda message: done.set_result(None))
        pull.start("owner-inbox")
        pipe.send(True)
        await asyncio.to_thread(pipe.recv)
        began_s, cpu_s = time.monotonic(), time.process_time()
        await done
        await bus.flush()
        pipe.send(Spent(seconds=time.monotonic() - began_s, cpu_s=time.process_time() - cpu_s))
        publisher.stop()
        await bus.close()
