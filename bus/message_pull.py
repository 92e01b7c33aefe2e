"""`MessagePull`: a standing pull on a consumer of durable messages, bounded in messages and bytes that are not done with.

As `bus.pull`, but for messages that each are a request of their own: whole ones are delivered (with headers and subject),
and no more are asked for while too many are held. What is asked for names the group of the consumer's owner: a consumer
that another has made anew since refuses it, and so gives none of his messages to one who thinks that he owns it still.
Source: JetStream's pull consumer protocol ($JS.API.CONSUMER.MSG.NEXT with `batch`, `max_bytes` and `expires`; statuses
404, 408, 409, 503; `Nats-Pending-Messages` tells what is left of a request that ended early) and priority groups (ADR-42;
400 where another's is named).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from bus.connection import Bus, Message
from bus.pull import left_out

MAX_HELD_MESSAGES = 8192
"""Messages of one lane of a model that a gateway holds."""

MAX_HELD_BYTES = 64 << 20
"""Their bytes."""

_BATCH = 512
_REFILL_AT = 256
_EXPIRES_S = 30.0
_SILENCE_S = _EXPIRES_S + 5
_HEARTBEAT_S = 1.0
_CLUSTER_SILENCE_S = 4.0
_PENDING = b"Nats-Pending-Messages"
_GONE = ("consumer deleted", "consumer not found", "consumer is push based", "priority group")


class MessagePull:
    """A standing pull of durable messages. While `has_room(size_bytes)` returns False it requests no messages.

    The owner passes every message of its inbox to `receive`. Times are monotonic.

    What is delivered is held until `done` is called with its size.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        deliver: Callable[[Message], None],
        has_room: Callable[[int], bool] = lambda _bytes: True,
    ) -> None:
        self._bus = bus
        self._has_room = has_room
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = ""
        self._group = ""
        self._deliver = deliver
        self._outstanding = 0
        self._heard_s = 0.0
        self.held = 0
        self.held_bytes = 0
        self.is_running = False
        self.consumer_lost = False

    def start(self, now_s: float, inbox: str, group: str) -> None:
        """Begins, or begins again where the broker has forgotten what was asked for, with another inbox.

        `group` is the one by which the consumer was made.
        """
        self._inbox = inbox
        self._group = group
        self._outstanding = 0
        self._heard_s = now_s
        self.consumer_lost = False
        self.is_running = True
        self._refill()

    def stop(self) -> None:
        """Asks for nothing more. What was asked for may still come: see `is_running`."""
        self.is_running = False

    def forget(self) -> None:
        """Nothing is held any more."""
        self.held = self.held_bytes = 0

    def check(self, now_s: float) -> None:
        """Asks again if nothing at all has been heard for longer than a request may last. Called now and then.

        In a cluster the server that leads the consumer beats, and what it had sent when it went may be lost.
        """
        if self.is_running and self._bus.is_clustered and now_s - self._heard_s > _CLUSTER_SILENCE_S:
            self.consumer_lost = True
        elif self.is_running and now_s - self._heard_s > _SILENCE_S:
            self.start(now_s, self._inbox, self._group)
        else:
            self._refill()

    def receive(self, message: Message, now_s: float) -> None:
        """Takes one message of the inbox."""
        self._heard_s = now_s
        if message.status:
            self._on_status(message)
            return
        self._outstanding -= 1
        self.held += 1
        self.held_bytes += len(message.data) + len(message.header_block)
        self._deliver(message)
        self._refill()

    def done(self, size_bytes: int) -> None:
        """A message of this size (header block and data) is held no longer."""
        self.held -= 1
        self.held_bytes -= size_bytes
        self._refill()

    def _refill(self) -> None:
        if not self.is_running or self._outstanding > _REFILL_AT:
            return
        # A request must let the largest message pass, or it would never come; so two of those that are open fit.
        request_bytes = max(MAX_HELD_BYTES // 4, self._bus.max_payload_bytes + 65536)
        room = MAX_HELD_MESSAGES - self.held - max(0, self._outstanding)
        if room < _BATCH or self.held_bytes > max(0, MAX_HELD_BYTES - 2 * request_bytes):
            return
        if not self._has_room(request_bytes):
            return
        self._outstanding = max(0, self._outstanding) + _BATCH
        asked: dict[str, object] = {
            "batch": _BATCH,
            "max_bytes": request_bytes,
            "expires": int(_EXPIRES_S * 1e9),
            "group": self._group,
        }
        if self._bus.is_clustered:
            asked["idle_heartbeat"] = int(_HEARTBEAT_S * 1e9)
        self._bus.publish(self._next_subject, json.dumps(asked).encode(), self._inbox)

    def _on_status(self, message: Message) -> None:
        if message.status == "100":
            return
        headers = message.header_block
        told = headers.split(b"\r\n", 1)[0].decode("latin-1").lower()
        if message.status == "503" or any(word in told for word in _GONE):
            self.consumer_lost = True
            return
        self._outstanding = max(0, self._outstanding - left_out(headers, _BATCH))
        # A request that was refused says nothing of messages: the next one would be refused as well. `check` asks again.
        if message.status in ("404", "408") or _PENDING in headers:
            self._refill()
