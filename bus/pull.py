"""`FramePull`: a standing pull on one JetStream consumer.

nats-py's `fetch` costs 45 us a message and one round trip a call; a standing pull costs what a subscription costs: one
request asks for many messages, and the next is sent before the first is used up.
Several requests are open at once. `_outstanding` is how many messages JetStream still owes of all of them: a request that
ends early says how many of its own it leaves out, and only these are asked for again. Taking its end for the end of all
would leave one more request open after each burst, up to the consumer's limit of open requests.
Source: JetStream's pull consumer protocol ($JS.API.CONSUMER.MSG.NEXT; statuses 100, 404, 408, 409, 503 in the `Status`
header of an empty message, with `Nats-Pending-Messages`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from bus.connection import Bus, Message
from bus.headers import last_header

_BATCH = 512
_REFILL_AT = 128
_EXPIRES_S = 30.0
_HEARTBEAT_S = 1.0
_SILENCE_S = 3.5
_ACK = b"+ACK"
_TERM = b"+TERM"


class FramePull:
    """Keeps messages of `consumer` coming to `inbox`, a subject that the owner subscribes to.

    The owner passes every message of the inbox to `receive`, which hands real ones to `deliver(data, ack_subject)`.
    `group` is the consumer's priority group, if it has one.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        inbox: str,
        deliver: Callable[[bytes, str], None],
        group: str = "",
    ) -> None:
        self._bus = bus
        self._consumer = consumer
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = inbox
        self._deliver = deliver
        self._outstanding = 0
        self._beats = bus.is_clustered
        self._heard_s = 0.0
        self._request = self._asked(group)
        self._paused = False
        self.consumer_lost = False

    def start(self, group: str | None = None, stream: str = "") -> None:
        """Sends the first request; called again after a reconnection, when the broker has forgotten all of them.

        With `group` when the consumer has another one now, with `stream` when it may lie in another one.
        """
        if group is not None:
            self._request = self._asked(group)
        if stream:
            self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{self._consumer}"
        self._outstanding = 0
        self.consumer_lost = False
        self._ask()

    @property
    def is_silent(self) -> bool:
        """Whether nothing has been heard for so long that the consumer must be without a leader, or have another."""
        return self._beats and not self._paused and time.monotonic() - self._heard_s > _SILENCE_S

    def receive(self, message: Message) -> None:
        """Takes one message of the inbox."""
        if self._beats:
            self._heard_s = time.monotonic()
        if message.status:
            self._on_status(message)
            return
        self._outstanding -= 1
        self._deliver(message.data, message.reply)
        if self._outstanding <= _REFILL_AT and not self._paused:
            self._ask()

    def pause(self) -> None:
        """Asks for nothing more: what comes stays in the stream, whose limits then refuse publishes."""
        self._paused = True

    def resume(self) -> None:
        """Goes on asking."""
        if self._paused:
            self._paused = False
            if self._outstanding <= _REFILL_AT:
                self._ask()

    def ack(self, ack_subject: str) -> None:
        """The message is done with, for good."""
        self._bus.publish(ack_subject, _ACK)

    def refuse(self, ack_subject: str) -> None:
        """The message is not one of ours and shall never be delivered again."""
        self._bus.publish(ack_subject, _TERM)

    def _ask(self) -> None:
        if self._beats:
            self._heard_s = time.monotonic()
        self._outstanding += _BATCH
        self._bus.publish(self._next_subject, self._request, self._inbox)

    def _on_status(self, message: Message) -> None:
        if message.status == "408" or message.status == "404":
            self._outstanding = max(0, self._outstanding - left_out(message.header_block, _BATCH))
            if self._outstanding <= _REFILL_AT and not self._paused:
                self._ask()
        elif message.status in ("400", "409", "503"):  # 400: it is there, and another's
            self.consumer_lost = True

    def _asked(self, group: str) -> bytes:
        asked: dict[str, object] = {"batch": _BATCH, "expires": int(_EXPIRES_S * 1e9)}
        if self._beats:
            # The server that leads the consumer may go, and what was asked of it with it: nobody says so then.
            asked["idle_heartbeat"] = int(_HEARTBEAT_S * 1e9)
        if group:
            asked["group"] = group
        return json.dumps(asked).encode()


def left_out(header_block: bytes, batch: int) -> int:
    """How many messages a request of `batch` that ended early leaves out, by the status that ended it.

    All of them where nats-server does not say.
    """
    told = last_header(header_block, b"Nats-Pending-Messages")
    return min(int(told), batch) if told.isascii() and told.isdigit() and len(told) < 10 else batch
