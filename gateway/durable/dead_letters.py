"""`DeadLetters`: copies in stream DEAD of requests that can't be done: as they were sent, with the reason and the history.

What lies there can be replayed: its headers and body are the original ones, but for those of NATS itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import orjson

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher, StoreAck
from bus.connection import Bus
from bus.headers import pack_headers
from gateway.durable.durable_request import DurableRequest

logger = logging.getLogger("weir.gateway")

_RETRY_S = 1.0
_MAX_REASON_LENGTH = 1024
_SPARE_BYTES = 256


class DeadLetters:
    """See the module."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher

    def add(self, request: DurableRequest, reason: str, on_added: Callable[[], None]) -> None:
        """Stores a copy; `on_added` is called when it is there."""
        # A request that was replayed has the id of its first letter, and may need another soon after.
        name = f"dead-{request.id}-{request.delivery.sequence}"
        told = [
            ("Nats-Msg-Id", name),
            ("Weir-Dead-Reason", reason[:_MAX_REASON_LENGTH]),
            ("Weir-Dead-Subject", request.message.subject),
            ("Weir-Dead-Id", request.id),
            ("Weir-Dead-Ms", str(time.time_ns() // 1_000_000)),
            ("Weir-Attempts", str(request.attempts)),
        ]
        history = [(a.ended_ms, a.reason[:200]) for a in request.trials.history]
        original = original_lines(request.message.header_block)
        block = pack_headers([*told, ("Weir-History", orjson.dumps(history).decode())])[:-2] + original
        data = request.message.data
        if len(block) + len(data) + _SPARE_BYTES > self._bus.max_payload_bytes:
            # The message was nearly as large as one may be: what can be done without is left out.
            told[1] = ("Weir-Dead-Reason", reason[:_SPARE_BYTES])
            block = pack_headers(told)[:-2] + original
        if len(block) + len(data) > self._bus.max_payload_bytes:
            data = b""
            block = pack_headers([*told, ("Weir-Dead-Truncated", str(len(request.message.data)))])[:-2] + original
            logger.warning("the dead letter of a request to %s is too large to be kept with its body", request.model)
        self._store(subjects.dead(request.model), data, block, on_added)

    def _store(self, subject: str, data: bytes, block: bytes, on_added: Callable[[], None]) -> None:
        def stored(ack: StoreAck) -> None:
            if ack.is_stored:
                on_added()
                return
            logger.warning("a dead letter is not stored: %s", ack.description)
            asyncio.get_running_loop().call_later(_RETRY_S, self._store, subject, data, block, on_added)

        self._publisher.publish(subject, data, block, stored)


def original_lines(block: bytes) -> bytes:
    """The headers as they were sent, to follow others, and the empty line that ends them.

    Those by which the stream was told what to do with the message are not repeated to another.
    """
    lines = block.split(b"\r\n")[1:]
    kept = [line for line in lines if line and not line.lower().startswith((b"nats-", b"weir-dead-"))]
    return b"".join(line + b"\r\n" for line in kept) + b"\r\n"
