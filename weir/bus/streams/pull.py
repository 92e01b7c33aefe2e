"""`StandingPull`: keeps the messages of a consumer coming, and `BoundedPull`, which holds a limited number of them.

nats-py's `fetch` costs 45 us a message and one round trip a call. A standing pull costs what a subscription costs: one
request covers many messages, and the next is sent before the first is used up. Several requests are open at once.
`_outstanding` is the number of messages that JetStream still owes for all of them. A request that ends early says how many
messages it leaves out, and only these are requested again: a pull that took its end for the end of all of them would have
one more request open after each burst, up to the consumer's limit.

Requests name the consumer's priority group, which each owner chooses for itself: a consumer that another owner has
recreated rejects requests of the owner before, and so delivers none of its messages to a process that was paused.
Source: JetStream's pull consumer protocol ($JS.API.CONSUMER.MSG.NEXT with `batch`, `max_bytes`, `expires` and
`idle_heartbeat`; statuses 100, 404, 408, 409, 503 with `Nats-Pending-Messages`) and priority groups (ADR-42; 400 for
another group).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson

from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.headers import last_header

MAX_HELD_MESSAGES = 8192
"""Messages of one lane of a model that a gateway holds."""

MAX_HELD_BYTES = 64 << 20
"""Their bytes."""

_BATCH = 512
_EXPIRES_S = 30.0
_HEARTBEAT_S = 1.0
_SILENCE_S = _EXPIRES_S + 5
_CLUSTER_SILENCE_S = 3.5
_PENDING = b"Nats-Pending-Messages"
_LOST = (
    "consumer deleted",
    "consumer not found",
    "consumer is push based",
    "priority group",
    "leadership change",
    "server shutdown",
)


class StandingPull:
    """Keeps messages of `consumer` coming to `inbox`, a subject that its owner subscribes to.

    The owner passes every message of the inbox to `receive`, which passes those of the stream to `deliver`, and calls
    `check` about once a second. `consumer_lost` is True once the consumer must be acquired again.
    """

    refill_at = 128
    """The number of outstanding messages at which the next request is sent."""

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        deliver: Callable[[Message], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._consumer = consumer
        self._request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._deliver = deliver
        self._clock = clock
        self._inbox = ""
        self._group = ""
        self._outstanding = 0
        self._received_s = 0.0
        self._has_heartbeats = False
        self.is_running = False
        self.consumer_lost = False

    def start(self, inbox: str = "", group: str | None = None, stream: str = "") -> None:
        """Requests messages. Called again when the broker has lost the requests, as after a reconnection.

        `inbox` is the subject to deliver to, `group` the consumer's priority group ("" for none), `stream` where the
        consumer is now; those that are not given stay as they were.
        """
        self._inbox = inbox or self._inbox
        self._group = self._group if group is None else group
        if stream:
            self._request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{self._consumer}"
        self._outstanding = 0
        self._received_s = self._clock()
        self.consumer_lost = False
        self.is_running = True
        self._refill()

    def pause(self) -> None:
        """Requests nothing more. Messages requested before still arrive; the rest stays in the stream."""
        self.is_running = False

    def resume(self) -> None:
        """Requests messages again after `pause`."""
        if not self.is_running:
            self.is_running = True
            self._refill()

    @property
    def is_silent(self) -> bool:
        """Whether no heartbeat arrives, so that the consumer of a cluster has no leader, or another one."""
        is_due = self._has_heartbeats and self.is_running and self._outstanding > 0
        return is_due and self._clock() - self._received_s > _CLUSTER_SILENCE_S

    def check(self) -> None:
        """Requests messages again where JetStream has rejected a request, or has sent nothing for longer than one lasts."""
        if self.is_silent:
            self.consumer_lost = True
        elif self.is_running and self._clock() - self._received_s > _SILENCE_S:
            self.start()
        else:
            self._refill()

    def receive(self, message: Message) -> None:
        """Takes one message of the inbox."""
        self._received_s = self._clock()
        if message.status:
            self._on_status(message)
            return
        self._outstanding -= 1
        self._deliver(message)
        if self._outstanding <= self.refill_at:
            self._refill()

    def ack(self, ack_subject: str) -> None:
        """Acknowledges a message: it is removed from a work queue."""
        self._bus.publish(ack_subject, b"+ACK")

    def reject(self, ack_subject: str) -> None:
        """Has JetStream never deliver a message again, because it is malformed."""
        self._bus.publish(ack_subject, b"+TERM")

    def _bounds(self) -> dict[str, Any] | None:
        """Fields that bound the next request; None where there is no room for one."""
        return {}

    def _refill(self) -> None:
        if not self.is_running or self._outstanding > self.refill_at:
            return
        bounds = self._bounds()
        if bounds is None:
            return
        request: dict[str, Any] = {"batch": _BATCH, "expires": int(_EXPIRES_S * 1e9), **bounds}
        self._has_heartbeats = self._bus.is_clustered
        if self._has_heartbeats:
            # The server that leads the consumer may be lost with its requests, and no other server reports that.
            request["idle_heartbeat"] = int(_HEARTBEAT_S * 1e9)
        if self._group:
            request["group"] = self._group
        if self._outstanding <= 0:
            self._received_s = self._clock()  # heartbeats come for open requests only
        self._outstanding = max(0, self._outstanding) + _BATCH
        self._bus.publish(self._request_subject, orjson.dumps(request), self._inbox)

    def _on_status(self, message: Message) -> None:
        if message.status == "100":  # a heartbeat
            return
        block = message.header_block
        description = block.split(b"\r\n", 1)[0].decode("latin-1").lower()
        if message.status in ("400", "503") or any(text in description for text in _LOST):
            self.consumer_lost = True
            return
        self._outstanding = max(0, self._outstanding - _left_out(block))
        # A rejected request says nothing about messages, and the next one would be rejected as well: `check` sends it.
        if message.status in ("404", "408") or _PENDING in block:
            self._refill()


class BoundedPull(StandingPull):
    """A standing pull that requests nothing while too many messages are held, or `has_room(size_bytes)` is False.

    A delivered message is held until `done` is called with its size.
    """

    refill_at = 256

    def __init__(  # noqa: PLR0913 - those of `StandingPull` and one more
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        deliver: Callable[[Message], None],
        has_room: Callable[[int], bool] = lambda _bytes: True,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus, stream, consumer, deliver, clock=clock)
        self._has_room = has_room
        self.held = 0
        self.held_bytes = 0

    def receive(self, message: Message) -> None:
        """Takes one message of the inbox."""
        if not message.status:
            self.held += 1
            self.held_bytes += len(message.data) + len(message.header_block)
        super().receive(message)

    def done(self, size_bytes: int) -> None:
        """A message of this size (header block and data) is held no longer."""
        self.held -= 1
        self.held_bytes -= size_bytes
        self._refill()

    def clear(self) -> None:
        """No message is held any longer."""
        self.held = self.held_bytes = 0

    def _bounds(self) -> dict[str, Any] | None:
        # A request must admit the largest message, or that would never be delivered; two requests may be open.
        request_bytes = max(MAX_HELD_BYTES // 4, self._bus.max_payload_bytes + 65536)
        room = MAX_HELD_MESSAGES - self.held - max(0, self._outstanding)
        if room < _BATCH or self.held_bytes > max(0, MAX_HELD_BYTES - 2 * request_bytes):
            return None
        return {"max_bytes": request_bytes} if self._has_room(request_bytes) else None


def _left_out(header_block: bytes) -> int:
    """How many messages a request that ended early leaves out; all of them if nats-server does not report it."""
    number = last_header(header_block, _PENDING)
    return min(int(number), _BATCH) if number.isascii() and number.isdigit() and len(number) < 10 else _BATCH
