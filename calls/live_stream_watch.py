"""`LiveStreamWatch`: notices that a stream of live requests is another than the one requests were sent to.

Somebody may delete it. Whoever is to be told by the stream makes it anew at once, so a caller that sends nothing just then
sees nothing of it, and what lay there is gone. While a request waits, the streams are looked at now and then.
"""

from __future__ import annotations

import logging

from nats.errors import Error as NatsError

from bus import subjects
from bus.connection import Bus
from bus.streams import ensure_live_streams, ensure_streams
from calls.in_flight import InFlight

logger = logging.getLogger("weir.calls")


class LiveStreamWatch:
    """See the module. When a stream is another, all is recovered as after a reconnection (`Bus.doubt`)."""

    def __init__(self, bus: Bus, in_flight: InFlight) -> None:
        self._bus = bus
        self._in_flight = in_flight
        self._made: list[object] = []
        self._oldest = -1

    async def start(self) -> None:
        """Makes all that roles rely on. Raises as `ensure`."""
        await ensure_streams(self._bus)
        await self.ensure()

    async def ensure(self) -> None:
        """Makes the streams that are missing: these are what requests are sent to.

        Raises NatsError, OSError or TimeoutError.
        """
        await ensure_live_streams(self._bus)
        self._made = await self._look_up()

    async def look(self) -> None:
        """Called each second or so: looks where the oldest request is the same as last time."""
        oldest = next((pending.key for pending in self._in_flight), -1)
        waits, self._oldest = oldest >= 0 and oldest == self._oldest, oldest
        if not waits or not self._made:
            return
        losses, known = self._bus.losses, self._made
        try:
            found = await self._look_up()
        except (NatsError, OSError, TimeoutError) as error:
            logger.debug("streams of live requests not looked at: %s", error)
            return
        if found != known and known is self._made and losses == self._bus.losses:
            self._bus.doubt("a stream of live requests was deleted, and what it held is gone")

    async def _look_up(self) -> list[object]:
        """When each stream was made; None for one that isn't there."""
        names = [subjects.live_stream(number) for number in range(self._bus.live_layout.streams)]
        return [(await self._bus.ask(f"$JS.API.STREAM.INFO.{name}")).get("created") for name in names]
