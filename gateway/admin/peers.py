"""`GatewayPeers`: what a client changes at one gateway is known at all of them when it has the response.

Clients see several gateways as one server: behind shared ports or a load balancer, the next request of a client may reach
another one. Changes travel as messages to all gateways: of buckets (regions, settings, jobs) and of the registry. A
gateway that has made a change asks the others for an answer. What nats-server delivers to one connection stays in order,
so a gateway that answers has received what this one had received or written before it asked.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from weir.bus.kv.presence import PresenceView
from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.replies import ReplyInbox
from weir.runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.gateway")

_limited = LogLimiter(logger)

ANSWER_TIMEOUT_S = 1.0
"""How long a change waits for the other gateways. One that is stopped or overloaded knows of it later."""

_LONGEST_ID = 1024

Synchronise = Callable[[], Awaitable[None]]
"""The type of `GatewayPeers.synchronise`."""


class GatewayPeers:
    """The other gateways. Everything runs in one event loop."""

    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self._bus = bus
        self._id = gateway_id
        self._view = PresenceView(bus, "gateway")
        self._replies = ReplyInbox(bus, subjects.peer_answers(gateway_id))

    async def start(self) -> None:
        """Finds the other gateways, and answers them from now on."""
        await self._replies.start()
        await self._bus.subscribe(subjects.PEER_QUERY, self._answer)
        await self._view.start()

    def count(self) -> int:
        """How many gateways there are, with this one."""
        return len(self._view.processes.keys() | {self._id})

    def expire(self) -> None:
        """Removes gateways that have been silent for a while. Called periodically while the broker is connected."""
        self._view.expire()

    async def synchronise(self) -> None:
        """Returns when the other gateways know what this one knows, or after `ANSWER_TIMEOUT_S`."""
        waiting = self._view.processes.keys() - {self._id}
        if not waiting or not self._bus.is_connected:
            return

        def is_complete(message: Message) -> bool:
            waiting.discard(message.data[:_LONGEST_ID].decode(errors="replace"))
            return not waiting

        query = [subjects.PEER_QUERY]
        if not await self._replies.gather(query, b"", is_complete, timeout_s=ANSWER_TIMEOUT_S):
            _limited.warning(
                "late",
                "no answer from %s within %.0f s: a change that a client made here may not be in effect there yet",
                ", ".join(sorted(waiting)),
                ANSWER_TIMEOUT_S,
            )

    def _answer(self, message: Message) -> None:
        if may_reply_to(message, subjects.peer_answers("")):
            self._bus.publish(message.reply, self._id.encode())


async def no_peers() -> None:
    """Stands for `GatewayPeers.synchronise` where there is one gateway only."""
