"""`ReplyOutbox`: answers on their way to reply subjects (`Weir-Reply-To`), each sent again until it is known to have left.

An answer has left when the stream that takes its subject has acknowledged it; where no stream does, when nats-server has
passed it to those who subscribe. Where nobody subscribes it is dropped, as any message, but not just after a
reconnection, nor when it is sent for an owner before: whoever waits for it may be about to subscribe again.

What had not left when the connection was lost is sent again, and so is what left in the last moment before, for
nats-server may have ended with it. So an answer comes at least once; each copy has the same `Nats-Msg-Id`, by which a
stream stores it once.
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

from nats.errors import Error as NatsError

from bus import callback_subjects
from bus.acked_publisher import read_ack
from bus.connection import Bus, Message
from bus.jetstream_api import JetStreamApi
from runtime.containment import contained
from runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.gateway")

SUBSCRIBER_PATIENCE_S = 10.0
"""For so long after a reconnection, or a takeover, an answer that nobody subscribes to is tried again."""

ACK_PATIENCE_S = 60.0
"""For so long an answer is sent again that a stream does not take."""

RECENT_S = 0.1
RECENT_BYTES = 8 << 20
"""Answers that left so short a time before a loss of the connection, at most so many bytes of them, are sent again."""

_TICK_S = 0.25
_RESEND_S = 5.0
_STREAMS_FRESH_S = 30.0
_MAX_STREAMS_KNOWN = 4096
_ALL_STORED = frozenset({callback_subjects.SUBJECTS.partition(".")[0]})
"""First tokens of subjects that all belong to one stream, if it is there."""


class _Answer:
    __slots__ = ("data", "first_sent_s", "header_block", "losses", "on_left", "patient_until_s", "sent_s", "subject")

    def __init__(self, subject: str, data: bytes, header_block: bytes, on_left: Callable[[], None]) -> None:
        self.subject = subject
        self.data = data
        self.header_block = header_block
        self.on_left = on_left
        self.losses = -1  # of the connection, when it was sent last
        self.first_sent_s = self.sent_s = time.monotonic()
        self.patient_until_s = 0.0


class ReplyOutbox:
    """Sends answers to reply subjects until they have left. Acknowledgements arrive below `inbox`, this gateway's own."""

    def __init__(self, bus: Bus, api: JetStreamApi, inbox: str) -> None:
        self._bus = bus
        self._api = api
        self._inbox = inbox
        self._numbers = count(1)
        self._open: dict[int, _Answer] = {}
        self._unflushed: list[int] = []
        self._recent: deque[tuple[float, _Answer]] = deque()
        self._recent_bytes = 0
        self._streams: dict[
            str, tuple[bool, float]
        ] = {}  # by subject or pattern: whether a stream takes it, until when
        self._reconnected_s = -SUBSCRIBER_PATIENCE_S
        self._background: asyncio.TaskGroup | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._limiter = LogLimiter(logger)

    def __len__(self) -> int:
        """Answers that may not have left yet."""
        return len(self._open)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Listens for acknowledgements, and sends in tasks of `background`."""
        self._background = background
        await self._bus.subscribe(f"{self._inbox}.*", self._on_message)
        self._bus.on_loss(self._on_loss)
        self._bus.on_reconnect(self._on_reconnect)
        self._ticking = background.create_task(self._tick())

    def hurry(self) -> None:
        """Waits for no subscribers any more: the gateway stops."""
        self._is_stopping = True

    def stop(self) -> None:
        """Sends nothing more: what has not left is sent by the next owner."""
        self._is_stopping = True
        for task in (self._flushing, self._ticking):
            if task is not None:
                task.cancel()

    def send(
        self,
        subject: str,
        data: bytes,
        header_block: bytes,
        on_left: Callable[[], None] = lambda: None,
        is_repeated: bool = False,
    ) -> None:
        """Sends an answer; calls `on_left` once it has left. `is_repeated`: an owner before may have sent it."""
        number = next(self._numbers)
        answer = self._open[number] = _Answer(subject, data, header_block, on_left)
        if is_repeated:
            answer.patient_until_s = answer.first_sent_s + SUBSCRIBER_PATIENCE_S
        self._publish(number, answer)

    def _publish(self, number: int, answer: _Answer) -> None:
        if not self._bus.is_connected:
            return  # it leaves when the broker is back
        answer.sent_s, answer.losses = time.monotonic(), self._bus.losses
        self._bus.publish(answer.subject, answer.data, f"{self._inbox}.{number}", answer.header_block)
        self._unflushed.append(number)
        if self._flushing is None and self._background is not None and not self._is_stopping:
            self._flushing = self._background.create_task(self._flush())
        elif self._flushing is None:
            self._unflushed.clear()

    async def _flush(self) -> None:
        """Waits until nats-server has taken what was published; one round trip serves all that has come by then."""
        try:
            while self._unflushed:
                numbers, self._unflushed = self._unflushed, []
                try:
                    await self._bus.flush()
                except OSError:
                    return
                for number in numbers:
                    answer = self._open.get(number)
                    if answer is not None and answer.losses == self._bus.losses:
                        await self._on_taken(number, answer)
        finally:
            self._flushing = None

    @contained()
    async def _on_taken(self, number: int, answer: _Answer) -> None:
        """nats-server has passed the answer on: to who subscribes, or to a stream, which says so when it is stored."""
        if not await self._is_stored_by_stream(answer.subject):
            self._left(number, answer)

    async def _is_stored_by_stream(self, subject: str) -> bool:
        """Whether a stream takes messages on `subject`; where that can't be known now it is asked at the next try."""
        first = subject.partition(".")[0]
        if first == subject:
            return await self._has_stream(subject)
        # One question serves all subjects that begin so, where no stream has any of them.
        return await self._has_stream(f"{first}.>") and (first in _ALL_STORED or await self._has_stream(subject))

    async def _has_stream(self, pattern: str) -> bool:
        known = self._streams.get(pattern)
        if known is not None and known[1] > time.monotonic():
            return known[0]
        try:
            found = await self._api.ask("$JS.API.STREAM.NAMES", {"subject": pattern})
            has_stream, fresh_s = bool(found.get("streams")), _STREAMS_FRESH_S
        except (NatsError, OSError, TimeoutError):
            has_stream, fresh_s = True, _RESEND_S  # an acknowledgement is waited for, and it is asked again
        if len(self._streams) >= _MAX_STREAMS_KNOWN:
            self._streams.clear()
        self._streams[pattern] = has_stream, time.monotonic() + fresh_s
        return has_stream

    def _on_message(self, message: Message) -> None:
        text = message.subject.rpartition(".")[2]
        number = int(text) if text.isascii() and text.isdigit() else 0
        answer = self._open.get(number)
        if answer is not None:
            self._take_word(number, answer, message)

    @contained()
    def _take_word(self, number: int, answer: _Answer, message: Message) -> None:
        now_s = time.monotonic()
        if message.status == "503":
            patient_until_s = max(answer.patient_until_s, self._reconnected_s + SUBSCRIBER_PATIENCE_S)
            if self._is_stopping or now_s >= patient_until_s:
                self._left(number, answer)
            else:
                answer.losses = -1  # it is sent again by the next tick
            return
        ack = read_ack(message.data)
        if ack.is_stored or ack.is_no_ack:  # no acknowledgement: who subscribes has answered it
            self._left(number, answer)
        elif now_s - answer.first_sent_s > ACK_PATIENCE_S or self._is_stopping:
            self._limiter.warning("refused", "the stream of reply subjects refused an answer: %s", ack.description)
            self._left(number, answer)
        else:
            answer.losses = -1

    def _left(self, number: int, answer: _Answer) -> None:
        if self._open.pop(number, None) is None:
            return
        now_s, size = time.monotonic(), len(answer.data)
        self._recent.append((now_s, answer))
        self._recent_bytes += size
        self._forget_recent(now_s - RECENT_S)
        on_left, answer.on_left = answer.on_left, _nothing
        on_left()

    def _forget_recent(self, before_s: float) -> None:
        while self._recent and (self._recent[0][0] < before_s or self._recent_bytes > RECENT_BYTES):
            self._recent_bytes -= len(self._recent.popleft()[1].data)

    def _on_loss(self) -> None:
        self._forget_recent(time.monotonic() - RECENT_S)
        self._unflushed.clear()
        for _, answer in self._recent:
            self._open[next(self._numbers)] = answer
        self._recent.clear()
        self._recent_bytes = 0

    async def _on_reconnect(self) -> None:
        self._reconnected_s = time.monotonic()
        self._streams.clear()
        self._send_due()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._forget_recent(time.monotonic() - RECENT_S)
            self._send_due()

    @contained()
    def _send_due(self) -> None:
        """Sends again what was refused, or sent on another connection, or has had no acknowledgement for long."""
        now_s = time.monotonic()
        for number, answer in list(self._open.items()):
            if not self._bus.is_connected:
                return
            if now_s - max(answer.first_sent_s, self._reconnected_s) > ACK_PATIENCE_S:
                self._limiter.warning("unanswered", "the stream of a reply subject did not acknowledge an answer")
                self._left(number, answer)
            elif answer.losses != self._bus.losses or now_s - answer.sent_s > _RESEND_S:
                self._publish(number, answer)


def _nothing() -> None:
    """Nobody waits for an answer that is sent once more."""
