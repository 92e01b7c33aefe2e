"""`ThreadPublisher`: sends what instances produce, from their threads and from the event loop.

Messages to processes with a link (`weir.bus.links`) leave in the thread that sends them. The others go through nats-server:
a thread passes them to the event loop, which writes them to the connection of the `Bus` in the order in which they were
passed. The event loop never waits. A thread waits while nats-server is slow to read, so that outputs don't fill memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from weir.bus.links.framing import Outgoing
from weir.bus.links.link import Link, Sent, WhenWritten
from weir.bus.nats.connection import Bus
from weir.runtime.containment import call_each

MAX_UNSENT_BYTES = 8 << 20
"""Bytes of the connection that nats-server has not read, beyond which messages are queued here."""

MAX_QUEUED_BYTES = 8 << 20
"""Bytes that are queued here, beyond which threads wait."""

MAX_WAIT_S = 0.5
"""How long a thread waits with each publish. No longer, because it may hold the lock of a batch, and the event loop, which
makes room, may wait for that one. The `Bus` disconnects a server that hangs after some seconds."""

_CHECK_S = 0.002
"""How often the event loop checks whether nats-server has read."""

_PUBLISHING = "weir.bus.nats.thread_publisher: publishing a message of an instance"

OnSent = Callable[[], None]
"""Must not raise, and must not publish."""


class ThreadPublisher:
    """`publish` and `send` may be called in any thread; created in the event loop."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._state = threading.Condition()
        self._queued: list[tuple[Sequence[Outgoing], OnSent]] = []  # while there are any, `_flush` is due
        self._queued_bytes = 0
        bus.links.send_unsent = self.send

    def publish(self, messages: Iterable[Outgoing], on_sent: OnSent = lambda: None) -> None:
        """Sends the messages to the broker, in order, behind those published before; then calls `on_sent` in the loop."""
        messages = list(messages)
        size_bytes = sum([len(data) for _, data in messages])
        is_loop = threading.get_ident() == self._loop_thread
        with self._state:
            if not is_loop:
                self._state.wait_for(lambda: self._queued_bytes < MAX_QUEUED_BYTES, MAX_WAIT_S)
            is_due = bool(self._queued)
            self._queued.append((messages, on_sent))
            self._queued_bytes += size_bytes
        if is_due:
            return
        if is_loop:
            self._flush()
        else:
            self._loop.call_soon_threadsafe(self._flush)

    def send(self, messages: Sequence[Outgoing], last: Sequence[Outgoing] = (), on_sent: OnSent = lambda: None) -> None:
        """Sends `messages`, each through the link to its process or, without one, to the broker; then those in `last`.

        `last` leaves once the kernel has all others, so that none of them is lost with this process; behind others that go
        to the broker, because their link has ended, it goes to the broker, too. Calls `on_sent` in the end, in any thread.
        """
        by_link, others = self._by_link(messages)
        ends, other_ends = self._by_link(last)
        if not others and not other_ends and len(ends) == 1 and by_link.keys() <= ends.keys():
            # A process that is both caller and scheduler takes everything in one write.
            ((end, linked),) = ends.items()
            by_link, ends = {end: [*by_link.get(end, ()), *linked]}, {}
        buffering: list[Link] = []
        for link, linked in by_link.items():
            sent = link.send(linked)
            if sent is Sent.REJECTED:
                others += linked
            elif sent is Sent.BUFFERED and last:
                buffering.append(link)
        if buffering:
            _when_written(buffering, partial(self._send_last, others, ends, other_ends, on_sent))
        else:
            self._send_last(others, ends, other_ends, on_sent, are_written=True)

    def _send_last(
        self,
        others: list[Outgoing],
        ends: dict[Link, list[Outgoing]],
        other_ends: list[Outgoing],
        on_sent: OnSent,
        are_written: bool,
    ) -> None:
        to_broker = [*others, *other_ends]
        for link, linked in ends.items():
            # Behind messages to the broker only the broker keeps the order.
            if others or not are_written or link.send(linked) is Sent.REJECTED:
                to_broker += linked
        if to_broker:
            self.publish(to_broker, on_sent)
        else:
            on_sent()

    def _by_link(self, messages: Iterable[Outgoing]) -> tuple[dict[Link, list[Outgoing]], list[Outgoing]]:
        """The messages by the link to their process, and those to processes without one."""
        route, by_link, others = self._bus.links.route, {}, []  # type: ignore[var-annotated]
        for message in messages:
            link = route(message[0])
            if link is None:
                others.append(message)
            elif link in by_link:
                by_link[link].append(message)
            else:
                by_link[link] = [message]
        return by_link, others

    def _flush(self) -> None:
        if self._bus.is_connected and self._bus.unsent_bytes > MAX_UNSENT_BYTES:
            self._loop.call_later(_CHECK_S, self._flush)
            return
        with self._state:
            queued, self._queued, self._queued_bytes = self._queued, [], 0
            self._state.notify_all()
        self._bus.dispatch(self._publish_all, queued)

    def _publish_all(self, queued: Sequence[tuple[Sequence[Outgoing], OnSent]]) -> None:
        for messages, on_sent in queued:
            for subject, data in messages:
                call_each(_PUBLISHING, (self._bus.publish_to_broker,), subject, data)
            call_each(_PUBLISHING, (on_sent,))


def _when_written(links: Sequence[Link], then: WhenWritten, are_written: bool = True) -> None:
    """Calls `then` once none of the links has anything buffered, or has ended, with whether all has been written."""
    if links:
        links[0].when_written(lambda is_written: _when_written(links[1:], then, are_written and is_written))
    else:
        then(are_written)
