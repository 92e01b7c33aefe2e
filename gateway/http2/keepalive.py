"""`KeepaliveManager`: the timers of a connection: handshake, keepalive, and maximum age."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from weir.gateway.http2.connection import Connection
from weir.gateway.http2.frames import Http2ErrorCode
from weir.gateway.http2.options import Http2Options

HANDSHAKE_TIMEOUT_S = 20.0
"""The time that a peer has for its preface and settings."""

_AGE_JITTER = 0.1  # gRFC A9: connections that were opened together should not all end together
_PING = b"alive?\0\0"


class KeepaliveManager:
    """The timers of one connection.

    Calls `abort` when the peer answers no keepalive, and `count_silent` before it ends a connection without a handshake.

    `last_received_s` is the time of the loop at which the peer last sent something.
    """

    __slots__ = (
        "_abort",
        "_age",
        "_connection",
        "_count_silent",
        "_greeting",
        "_keepalive",
        "_loop",
        "_made_s",
        "_options",
        "_pings_without_data",
        "last_received_s",
    )

    def __init__(
        self,
        connection: Connection,
        options: Http2Options,
        abort: Callable[[], None],
        count_silent: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._abort = abort
        self._count_silent = count_silent
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._pings_without_data = 0
        self._made_s = self.last_received_s = self._loop.time()
        self._keepalive = self._loop.call_later(options.keepalive_time_s, self._check_idle)
        self._greeting = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._check_greeting)
        self._age: asyncio.TimerHandle | None = None
        if options.max_age_s:
            age_s = options.max_age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)  # noqa: S311
            self._age = self._loop.call_later(age_s, self._end_of_age)

    def idle_s(self) -> float:
        """For how long the peer has sent nothing; before the handshake, for how long the connection has been open."""
        return self._loop.time() - (self.last_received_s if self._connection.has_handshake else self._made_s)

    def end(self) -> None:
        """Stops the timers: the connection is closed."""
        self._keepalive.cancel()
        self._greeting.cancel()
        if self._age is not None:
            self._age.cancel()

    def _check_idle(self) -> None:
        options = self._options
        silent_s = self._loop.time() - self.last_received_s
        if silent_s < options.keepalive_time_s:
            self._keepalive = self._loop.call_later(options.keepalive_time_s - silent_s, self._check_idle)
        elif self._may_ping():
            self._pings_without_data += 1
            self._connection.ping(_PING)
            self._keepalive = self._loop.call_later(
                options.keepalive_timeout_s, self._check_reply, self.last_received_s
            )
        else:
            self._keepalive = self._loop.call_later(options.keepalive_time_s, self._check_idle)

    def _may_ping(self) -> bool:
        if self._connection.has_responded:
            self._connection.has_responded = False
            self._pings_without_data = 0
        if not (self._connection.streams or self._options.keepalive_permit_without_calls):
            return False
        limit = self._options.max_pings_without_data
        return not limit or self._pings_without_data < limit

    def _check_reply(self, before_s: float) -> None:
        if self.last_received_s > before_s:
            self._check_idle()
        else:
            self._abort()

    def _check_greeting(self) -> None:
        if not self._connection.has_handshake:
            self._count_silent()
            self._connection.close(Http2ErrorCode.SETTINGS_TIMEOUT, "no SETTINGS within the handshake timeout")

    def _end_of_age(self) -> None:
        self._connection.drain()
        if self._options.max_age_grace_s:
            self._age = self._loop.call_later(self._options.max_age_grace_s, self._connection.close)
