"""`AckedPublisher`: stores messages in streams, many at a time, and reports the result of each.

Each publish is acknowledged on a subject of its own, so the next one need not wait. A message without an acknowledgement is
published again after a reconnection, and after some seconds. So it may be stored twice, unless it has a `Nats-Msg-Id` or an
expected sequence (`Nats-Expected-Last-Subject-Sequence`), with which JetStream rejects the second copy.
Source: JetStream's publish acknowledgement (ADR-1).

A stream whose disk is full or fails is stalled: nats-server 2.15 keeps the first write error until it is restarted,
acknowledges nothing, and answers all else. That is how a slow stream differs, which holds its lock while it writes: so a
stream is stalled if it reports its state, but has not acknowledged a message that it got before.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count

import msgspec
import orjson

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus, Message
from weir.bus.nats.jetstream import WRONG_LAST_SEQUENCE
from weir.runtime.containment import contained
from weir.runtime.ticks import next_tick

logger = logging.getLogger("weir.bus")

NO_ROOM = (10077,)
"""Its codes for a stream that is full."""

_is_plain_ack = re.compile(rb'\{"stream":"[^"\\]*", ?"seq":([0-9]{1,19})\}', re.ASCII).fullmatch

_NOT_SENT = 1  # not a code of JetStream
_RETRY_S = 0.1  # no stream responds: it is being created, or its server restarts
_CHECK_INTERVAL_S = 1.0
_ACK_TIMEOUT_S = 5.0
_CLUSTER_ACK_TIMEOUT_S = 2.0  # the server that stored it may be lost with the acknowledgement

_STALLED_S = 1.0  # from the publish until the stream is asked for its state
_CLUSTER_STALLED_S = 6.0  # a message that was lost with a server is acknowledged when it is sent again
_GRACE_S = 0.2  # an acknowledgement may come after the state, which another thread sends


class StoreAck(msgspec.Struct, frozen=True, gc=False):
    """The result of a publish: the message's `sequence` in the stream, or an error (`error_code` is not 0)."""

    sequence: int = 0
    is_duplicate: bool = False
    error_code: int = 0
    description: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether the message is in the stream, from this publish or from an earlier one."""
        return not self.error_code

    @property
    def is_conflict(self) -> bool:
        """Whether another message has the expected place."""
        return self.error_code in WRONG_LAST_SEQUENCE

    @property
    def is_no_ack(self) -> bool:
        """Whether the message could not be published, or the response is not an acknowledgement."""
        return self.error_code == _NOT_SENT

    @property
    def is_full(self) -> bool:
        """Whether the stream is full."""
        return self.error_code in NO_ROOM


OnStored = Callable[[StoreAck], None]
OnStalled = Callable[[], None]


class _Unacked(msgspec.Struct, eq=False, gc=False):
    subject: str
    data: bytes
    header_block: bytes
    on_stored: OnStored
    on_stalled: OnStalled | None
    since_s: float  # its stream should have stored it, if that stores anything
    sent_s: float = 0.0
    is_stored: bool = False

    @property
    def stream(self) -> str:
        """Its stream, "" if that is not known here."""
        return subjects.stream_of(self.subject)


class AckedPublisher:
    """Publishes for one role, named `role_id`. Callers bound the number of messages in flight.

    `stalled` are the streams that store nothing, until they acknowledge a message again.
    """

    def __init__(self, bus: Bus, role_id: str) -> None:
        self._bus = bus
        self._acks = subjects.stored(role_id)
        self._numbers = count(1)
        self._unacked: dict[int, _Unacked] = {}
        self._losses = bus.losses
        self._watcher: asyncio.Task[None] | None = None
        self.stalled: set[str] = set()

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to acknowledgements. Call it after the start of those that recreate the streams."""
        await self._bus.subscribe(f"{self._acks}.*", self._on_ack)
        self._bus.on_reconnect(self._resend_all)
        self._watcher = background.create_task(self._watch())

    def stop(self) -> None:
        """Publishes no message again from now on."""
        if self._watcher is not None:
            self._watcher.cancel()

    def __len__(self) -> int:
        """The number of messages without an acknowledgement."""
        return len(self._unacked)

    def publish(
        self,
        subject: str,
        data: bytes,
        header_block: bytes,
        on_stored: OnStored,
        on_stalled: OnStalled | None = None,
    ) -> None:
        """Stores a message; `on_stored` is called in the event loop with the result.

        `on_stalled` is called if its stream turns out to be stalled meanwhile. The message is sent again nevertheless.
        """
        number = next(self._numbers)
        unacked = _Unacked(subject, data, header_block, on_stored, on_stalled, time.monotonic())
        self._unacked[number] = unacked
        self._send(number, unacked)

    async def store(self, subject: str, data: bytes, header_block: bytes = b"") -> StoreAck:
        """Stores a message and returns the result."""
        done: asyncio.Future[StoreAck] = asyncio.get_running_loop().create_future()
        self.publish(subject, data, header_block, lambda ack: None if done.done() else done.set_result(ack))
        return await done

    @contained(on_error="_reject")
    def _send(self, number: int, unacked: _Unacked) -> None:
        unacked.sent_s = time.monotonic()
        if self._bus.is_connected and self._losses == self._bus.losses:  # else it is sent after the reconnection
            self._bus.publish(unacked.subject, unacked.data, f"{self._acks}.{number}", unacked.header_block)

    def _reject(self, error: Exception, number: int, unacked: _Unacked) -> None:
        """Reports a message that can't be published at all."""
        if self._unacked.pop(number, None) is not None:
            unacked.on_stored(StoreAck(error_code=_NOT_SENT, description=f"it can't be published: {error}"))

    def _on_ack(self, message: Message) -> None:
        number = int(message.subject.rpartition(".")[2])
        unacked = self._unacked.get(number)
        if unacked is None:
            return
        if message.status:
            asyncio.get_running_loop().call_later(_RETRY_S, self._again, number)
            return
        del self._unacked[number]
        unacked.is_stored = True
        if self.stalled and unacked.stream in self.stalled:
            self.stalled.discard(unacked.stream)
            logger.info("stream %s stores messages again: what it stores is accepted again", unacked.stream)
        unacked.on_stored(read_ack(message.data))

    def _again(self, number: int) -> None:
        unacked = self._unacked.get(number)
        if unacked is not None:
            unacked.since_s = time.monotonic()
            self._send(number, unacked)

    async def _resend_all(self) -> None:
        if self._bus.is_connected:
            self._losses = self._bus.losses
        for number, unacked in list(self._unacked.items()):
            unacked.since_s = time.monotonic()
            self._send(number, unacked)

    async def _examine(self, late: Iterable[_Unacked]) -> None:
        """Asks the streams of these messages for their state: those that tell it and have not acknowledged are stalled."""
        for unacked in late:
            since_s = unacked.since_s
            with suppress(*BROKER_ERRORS):
                await self._bus.jetstream.stream_state(unacked.stream)
                await asyncio.sleep(_GRACE_S)
                if not unacked.is_stored and unacked.since_s == since_s:
                    self._stall(unacked.stream)

    def _stall(self, stream: str) -> None:
        self.stalled.add(stream)
        logger.error(
            "stream %s stores nothing: nats-server responds, but acknowledges no message; its disk may be full or failing, "
            "see its log. What it would store is refused until it stores again",
            stream,
        )
        for unacked in list(self._unacked.values()):
            if unacked.on_stalled is not None and unacked.stream == stream:
                unacked.on_stalled()

    async def _watch(self) -> None:
        while True:
            await next_tick(_CHECK_INTERVAL_S)
            now_s, is_clustered = time.monotonic(), self._bus.is_clustered
            late_s = now_s - (_CLUSTER_ACK_TIMEOUT_S if is_clustered else _ACK_TIMEOUT_S)
            stalled_s = now_s - (_CLUSTER_STALLED_S if is_clustered else _STALLED_S)
            late: dict[str, _Unacked] = {}  # one for each stream
            for number, unacked in list(self._unacked.items()):
                if unacked.since_s <= stalled_s and (stream := unacked.stream) not in {"", *self.stalled}:
                    late.setdefault(stream, unacked)
                if unacked.sent_s <= late_s:
                    self._send(number, unacked)
            if late and self._bus.is_connected and self._losses == self._bus.losses:
                await self._examine(late.values())


def read_ack(data: bytes) -> StoreAck:
    """The acknowledgement in a response of JetStream; `is_no_ack` for another response."""
    plain = _is_plain_ack(data)
    if plain is not None:
        return StoreAck(int(plain[1]))
    try:
        response = orjson.loads(data)
        error = response.get("error")
        if error is not None:
            return StoreAck(0, False, int(error.get("err_code", 0)) or int(error["code"]), str(error["description"]))
        return StoreAck(int(response["seq"]), bool(response.get("duplicate", False)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return StoreAck(error_code=_NOT_SENT, description="not an acknowledgement")
