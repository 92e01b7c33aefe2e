"""`ReplyOutbox`: sends responses to reply subjects (`Weir-Reply-To`), and resends each until it is known to be
delivered.

A response is delivered when the stream that stores its subject has acknowledged it; where no stream does, when
nats-server has passed it to subscribers. A response without a subscriber is dropped, as any message, except shortly
after a reconnection, or if an earlier owner may have sent it already: the subscriber may be about to subscribe again.

Responses that were not delivered when the connection was lost are sent again, and also those that were delivered in the
last moment before, because nats-server may have died with them. So a response arrives at least once; all copies have
the same `Nats-Msg-Id`, by which a stream stores it once.
Source: nats-server's "no responders" (status 503 to the reply subject, ahead of the next PONG); JetStream's publish
acknowledgement (ADR-1); `$JS.API.STREAM.NAMES`, whose `subject` finds streams that overlap with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from weir.bus.naming import durable_subjects as callback_subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus, Message
from weir.bus.nats.jetstream import JetStream
from weir.bus.streams.acked_publisher import read_ack
from weir.runtime.containment import contained
from weir.runtime.log_limiter import LogLimiter
from weir.runtime.ticks import next_tick

logger = logging.getLogger("weir.gateway")

SUBSCRIBER_TIMEOUT_S = 10.0
"""How long a response without a subscriber is resent after a reconnection or a takeover."""

ACK_TIMEOUT_S = 60.0
"""How long a response is resent that a stream does not acknowledge."""

RECENT_S = 0.1
RECENT_BYTES = 8 << 20
"""Responses that were delivered within this time before a loss of the connection, up to these bytes, are sent again."""

_TICK_S = 0.25
_IDLE_TICK_S = 0.5  # while no response waits
_RESEND_S = 5.0
_STREAMS_FRESH_S = 30.0
_MAX_CACHED_STREAMS = 4096
_ALL_STORED = frozenset({callback_subjects.CALLBACK_SUBJECTS.partition(".")[0]})
"""First tokens of subjects that all belong to one stream, if it exists."""


class _Reply:
    __slots__ = ("data", "first_sent_s", "header_block", "losses", "on_sent", "retry_until_s", "sent_s", "subject")

    def __init__(self, subject: str, data: bytes, header_block: bytes, on_sent: Callable[[], None]) -> None:
        self.subject = subject
        self.data = data
        self.header_block = header_block
        self.on_sent = on_sent
        self.losses = -1  # of the connection, at the last send
        self.first_sent_s = self.sent_s = time.monotonic()
        self.retry_until_s = 0.0


class ReplyOutbox:
    """Sends responses until they are delivered. Acknowledgements arrive below `inbox`, which is this process's own."""

    def __init__(self, bus: Bus, api: JetStream, inbox: str) -> None:
        self._bus = bus
        self._api = api
        self._inbox = inbox
        self._numbers = count(1)
        self._open: dict[int, _Reply] = {}
        self._unflushed: list[int] = []
        self._recent: deque[tuple[float, _Reply]] = deque()
        self._recent_bytes = 0
        # By subject or pattern: whether a stream stores it, and until when that is assumed.
        self._streams: dict[str, tuple[bool, float]] = {}
        self._reconnected_s = -SUBSCRIBER_TIMEOUT_S
        self._background: asyncio.TaskGroup | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._is_stopped = False
        self._limiter = LogLimiter(logger)

    def __len__(self) -> int:
        """Responses that may not be delivered yet."""
        return len(self._open)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to acknowledgements, and sends in tasks of `background`."""
        self._background = background
        await self._bus.subscribe(f"{self._inbox}.*", self._on_message)
        self._bus.on_loss(self._on_loss)
        self._bus.on_reconnect(self._on_reconnect)
        self._ticking = background.create_task(self._tick())

    def stop_waiting(self) -> None:
        """Does not wait for subscribers any more, because the process stops."""
        self._is_stopping = True

    def stop(self) -> None:
        """Stops sending; the next owner sends what is not delivered."""
        self._is_stopping = self._is_stopped = True
        for task in (self._flushing, self._ticking):
            if task is not None:
                task.cancel()

    def send(
        self,
        subject: str,
        data: bytes,
        header_block: bytes,
        on_sent: Callable[[], None] = lambda: None,
        is_repeated: bool = False,
    ) -> None:
        """Sends a response; calls `on_sent` once it is delivered. `is_repeated`: an earlier owner may have sent it."""
        number = next(self._numbers)
        response = self._open[number] = _Reply(subject, data, header_block, on_sent)
        if is_repeated:
            response.retry_until_s = response.first_sent_s + SUBSCRIBER_TIMEOUT_S
        self._publish(number, response)

    def _publish(self, number: int, response: _Reply) -> None:
        if not self._bus.is_connected:
            return  # it is sent when the broker is back
        response.sent_s, response.losses = time.monotonic(), self._bus.losses
        self._bus.publish(response.subject, response.data, f"{self._inbox}.{number}", response.header_block)
        self._unflushed.append(number)
        if self._flushing is None and self._background is not None and not self._is_stopped:
            self._flushing = self._background.create_task(self._flush())
        elif self._flushing is None:
            self._unflushed.clear()

    @contained()
    async def _flush(self) -> None:
        """Waits until nats-server has processed the published messages; one round trip serves all that were sent by
        then.
        """
        try:
            while self._unflushed:
                numbers, self._unflushed = self._unflushed, []
                try:
                    await self._bus.flush()
                except OSError:
                    return
                for number in numbers:
                    response = self._open.get(number)
                    if response is None or response.losses != self._bus.losses:
                        continue
                    # nats-server has passed it on, to subscribers or to a stream, which acknowledges it later.
                    if not await self._is_stored_by_stream(response.subject):
                        self._finish(number, response)
        finally:
            self._flushing = None

    async def _is_stored_by_stream(self, subject: str) -> bool:
        """Whether a stream stores messages on `subject`; True while that is unknown, until the next attempt."""
        first = subject.partition(".")[0]
        if first == subject:
            return await self._has_stream(subject)
        # One lookup serves all subjects with this first token, where no stream has any of them.
        return await self._has_stream(f"{first}.>") and (first in _ALL_STORED or await self._has_stream(subject))

    async def _has_stream(self, pattern: str) -> bool:
        known = self._streams.get(pattern)
        if known is not None and known[1] > time.monotonic():
            return known[0]
        try:
            found = await self._api.ask("STREAM.NAMES", {"subject": pattern})
            has_stream, fresh_s = bool(found.get("streams")), _STREAMS_FRESH_S
        except BROKER_ERRORS:
            has_stream, fresh_s = True, _RESEND_S  # wait for an acknowledgement, and look it up again
        if len(self._streams) >= _MAX_CACHED_STREAMS:
            self._streams.clear()
        self._streams[pattern] = has_stream, time.monotonic() + fresh_s
        return has_stream

    def _on_message(self, message: Message) -> None:
        text = message.subject.rpartition(".")[2]
        number = int(text) if text.isascii() and text.isdigit() else 0
        response = self._open.get(number)
        if response is None:
            return
        now_s = time.monotonic()
        if message.status == "503":
            retry_until_s = max(response.retry_until_s, self._reconnected_s + SUBSCRIBER_TIMEOUT_S)
            if self._is_stopping or now_s >= retry_until_s:
                self._finish(number, response)
            else:
                response.losses = -1  # the next tick sends it again
            return
        ack = read_ack(message.data)
        if ack.is_stored or ack.is_no_ack:  # not an acknowledgement: a subscriber has replied
            self._finish(number, response)
        elif now_s - response.first_sent_s > ACK_TIMEOUT_S or self._is_stopping:
            self._limiter.warning(
                "refused",
                "a stream rejected a response on its reply subject: %s; the response is dropped",
                ack.description,
            )
            self._finish(number, response)
        else:
            response.losses = -1

    def _finish(self, number: int, response: _Reply) -> None:
        if self._open.pop(number, None) is None:
            return
        now_s, size = time.monotonic(), len(response.data)
        self._recent.append((now_s, response))
        self._recent_bytes += size
        self._forget_recent(now_s - RECENT_S)
        on_sent, response.on_sent = response.on_sent, _no_callback
        on_sent()

    def _forget_recent(self, before_s: float) -> None:
        while self._recent and (self._recent[0][0] < before_s or self._recent_bytes > RECENT_BYTES):
            self._recent_bytes -= len(self._recent.popleft()[1].data)

    def _on_loss(self) -> None:
        self._forget_recent(time.monotonic() - RECENT_S)
        self._unflushed.clear()
        for _, response in self._recent:
            self._open[next(self._numbers)] = response
        self._recent.clear()
        self._recent_bytes = 0

    async def _on_reconnect(self) -> None:
        self._reconnected_s = time.monotonic()
        self._streams.clear()
        self._send_due()

    async def _tick(self) -> None:
        while True:
            await next_tick(_TICK_S if self._open else _IDLE_TICK_S)
            self._forget_recent(time.monotonic() - RECENT_S)
            self._send_due()

    @contained()
    def _send_due(self) -> None:
        """Resends responses that were rejected, sent on a lost connection, or not acknowledged for long."""
        now_s = time.monotonic()
        for number, response in list(self._open.items()):
            if not self._bus.is_connected:
                return
            if now_s - max(response.first_sent_s, self._reconnected_s) > ACK_TIMEOUT_S:
                self._limiter.warning(
                    "unanswered",
                    "a stream did not acknowledge a response on its reply subject within %g s; it is dropped",
                    ACK_TIMEOUT_S,
                )
                self._finish(number, response)
            elif response.losses != self._bus.losses or now_s - response.sent_s > _RESEND_S:
                self._publish(number, response)


def _no_callback() -> None:
    """Replaces the callback of a response that is sent once more."""
