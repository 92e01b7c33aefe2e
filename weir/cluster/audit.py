"""The audit log of a process: `AuditRecorder` writes events to a file and to stream AUDIT, `read_events` reads the stream.

The recorder is on while an access policy or a file is set. It never fails or delays a request: what the file or the broker
does not take is dropped there, counted, and logged once until it is taken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any, NamedTuple

import msgspec
from nats.js.errors import NotFoundError

from weir.access.audit import AuditEvent, AuditMerge
from weir.access.gate import Gate
from weir.bus.naming import subjects
from weir.bus.naming.identity import new_id
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.nats.headers import pack_headers
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck
from weir.bus.streams.declarations import ensure_audit_stream
from weir.runtime.ticks import next_tick
from weir.telemetry.line_writer import LineWriter

logger = logging.getLogger("weir.cluster")

MAX_BACKLOG = 4096
"""Events that the broker has not stored yet; further ones are dropped from the stream, but not from the file."""

_TICK_S = 0.25
_RETRY_S = 5.0
_LAST_ACKS_S = 1.0

_encoder = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(AuditEvent).decode


class AuditOptions(NamedTuple):
    """`path` is the file, "-" for standard output, "" for none; `max_bytes` is the size of the stream."""

    path: str
    max_bytes: int

    @classmethod
    def of(cls, settings: Any) -> AuditOptions:
        """Those in the settings of a role."""
        return cls(settings.audit_log, settings.audit_max_bytes)


class AuditRecorder:
    """The `Audits` of one process. `publisher` is that of the process, started before this one.

    `clock` returns Unix seconds. Raises WeirError (INVALID_ARG) for a file that can't be written.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: AckedPublisher,
        gate: Gate,
        options: AuditOptions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._gate = gate
        self._max_bytes = options.max_bytes
        self._clock = clock
        self._merge = AuditMerge()
        self._file = _file(options.path) if options.path else None
        self._backlog: deque[AuditEvent] = deque()
        self._unacked = 0
        self._id = new_id("audit")
        self._numbers = count(1)
        self._has_stream = False
        self._is_dropping = False
        self._ticking: asyncio.Task[None] | None = None
        self.dropped = 0
        """Events that are missing in the stream."""

    def record(self, event: AuditEvent) -> None:
        """Implements `Audits.record`."""
        if self._file is not None or self._gate.is_on:
            for complete in self._merge.add(event):
                self._keep(complete)

    def start(self, background: asyncio.TaskGroup) -> None:
        """Begins to record what the doors of the process decide. The stream is created for the first event."""
        self._gate.audits = self
        self._bus.on_reconnect(self._forget_stream)
        self._ticking = background.create_task(self._tick())

    async def stop(self) -> None:
        """Writes what is left, and waits a moment for the broker to store it. Call it before the publisher stops."""
        if self._ticking is not None:
            self._ticking.cancel()
        for event in self._merge.take_all():
            self._keep(event)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ACKS_S):
                while self._backlog or self._unacked:
                    if self._has_stream or await self._make_stream():
                        self._publish()
                    await asyncio.sleep(0.01)
        self._drop(len(self._backlog) + self._unacked, "the process stops before the broker has stored them")
        self._backlog.clear()
        if self._file is not None:
            self._file.close()

    def _keep(self, event: AuditEvent) -> None:
        if self._file is not None:
            self._file.put(event)
        if len(self._backlog) + self._unacked >= MAX_BACKLOG:
            self._drop(1, f"{MAX_BACKLOG} events wait for the broker")
            return
        self._backlog.append(event)
        if self._has_stream:
            self._publish()

    def _drop(self, events: int, why: str) -> None:
        if not events:
            return
        self.dropped += events
        if not self._is_dropping:
            self._is_dropping = True
            logger.error("stream %s lacks audit events: %s", subjects.AUDIT_STREAM, why)

    def _publish(self) -> None:
        while self._backlog:
            event = self._backlog.popleft()
            self._unacked += 1
            # Sent again after a reconnection: JetStream stores one message of an id.
            header = pack_headers([("Nats-Msg-Id", f"{self._id}-{next(self._numbers)}")])
            self._publisher.publish(subjects.audit(event.door), _encoder.encode(event), header, self._on_stored)

    def _on_stored(self, ack: StoreAck) -> None:
        self._unacked -= 1
        if not ack.is_stored:
            self._drop(1, f"the broker does not store an event: {ack.description}")
        elif self._is_dropping:
            self._is_dropping = False
            logger.warning("stream %s stores audit events again; it lacks %d", subjects.AUDIT_STREAM, self.dropped)

    async def _tick(self) -> None:
        next_try_s = 0.0
        while True:
            await next_tick(_TICK_S)
            for event in self._merge.expire(self._clock()):
                self._keep(event)
            now_s = asyncio.get_running_loop().time()
            if (self._backlog or self._unacked) and now_s >= next_try_s:
                if self._has_stream or await self._make_stream():
                    self._publish()
                else:
                    next_try_s = now_s + _RETRY_S

    async def _make_stream(self) -> bool:
        if not self._bus.is_connected:
            return False
        try:
            await ensure_audit_stream(self._bus, self._max_bytes)
        except BROKER_ERRORS as error:
            if not self._is_dropping:
                self._is_dropping = True
                logger.error("stream %s can't be created: %s: events wait", subjects.AUDIT_STREAM, error)
            return False
        self._has_stream = True
        return True

    async def _forget_stream(self) -> None:
        """A broker that lost its disk has no stream: it is looked for again."""
        self._has_stream = False


def _file(path: str) -> LineWriter[AuditEvent]:
    return LineWriter("--audit-log", path, _encoder.encode_lines)


async def read_events(bus: Bus) -> AsyncIterator[AuditEvent]:
    """The events of stream AUDIT, oldest first; none where there is no stream. Raises NatsError, OSError, TimeoutError."""
    messages = bus.jetstream.scan(subjects.AUDIT_STREAM, subjects.AUDIT_SUBJECTS, start=1)
    try:
        async with contextlib.aclosing(messages):
            async for message in messages:
                with contextlib.suppress(msgspec.MsgspecError):  # a release that has other events
                    yield _decode(message.data)
    except NotFoundError:
        return
