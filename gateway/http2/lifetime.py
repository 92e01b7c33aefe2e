"""`Lifetime`: how long a connection goes on: the greeting, keepalive, and the age at which it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from gateway.http2.connection import Connection
from gateway.http2.faults import FaultCode
from gateway.http2.options import Http2Options

GREETING_TIME_S = 20.0
"""How long a peer may take for its preface and settings."""

_AGE_JITTER = 0.1  # gRFC A9: connections that were opened together shall not all end together
_PING = b"alive?\0\0"


class Lifetime:
    """The timers of one connection; `hang_up` is called when nobody is at the other end.

    `heard_s` is the time of the loop when something last came from the peer.
    """

    __slots__ = (
        "_age",
        "_connection",
        "_greeting",
        "_hang_up",
        "_keepalive",
        "_loop",
        "_options",
        "_pings_without_data",
        "heard_s",
    )

    def __init__(self, connection: Connection, options: Http2Options, hang_up: Callable[[], None]) -> None:
        self._connection = connection
        self._hang_up = hang_up
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._pings_without_data = 0
        self.heard_s = self._loop.time()
        self._keepalive = self._loop.call_later(options.keepalive_time_s, self._look)
        self._greeting = self._loop.call_later(GREETING_TIME_S, self._check_greeting)
        self._age: asyncio.TimerHandle | None = None
        if options.max_age_s:
            age_s = options.max_age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)  # noqa: S311
            self._age = self._loop.call_later(age_s, self._end_of_age)

    def end(self) -> None:
        """The connection is closed."""
        self._keepalive.cancel()
        self._greeting.cancel()
        if self._age is not None:
            self._age.cancel()

    def _look(self) -> None:
        options = self._options
        silent_s = self._loop.time() - self.heard_s
        if silent_s < options.keepalive_time_s:
            self._keepalive = self._loop.call_later(options.keepalive_time_s - silent_s, self._look)
        elif self._may_ping():
            self._pings_without_data += 1
            self._connection.ping(_PING)
            self._keepalive = self._loop.call_later(options.keepalive_timeout_s, self._check_heard, self.heard_s)
        else:
            self._keepalive = self._loop.call_later(options.keepalive_time_s, self._look)

    def _may_ping(self) -> bool:
        if self._connection.has_responded:
            self._connection.has_responded = False
            self._pings_without_data = 0
        if not (self._connection.streams or self._options.keepalive_permit_without_calls):
            return False
        limit = self._options.max_pings_without_data
        return not limit or self._pings_without_data < limit

    def _check_heard(self, before_s: float) -> None:
        if self.heard_s > before_s:
            self._look()
        else:
            self._hang_up()

    def _check_greeting(self) -> None:
        if not self._connection.is_greeted:
            self._connection.close(FaultCode.SETTINGS_TIMEOUT, "no settings came")

    def _end_of_age(self) -> None:
        self._connection.drain()
        if self._options.max_age_grace_s:
            self._age = self._loop.call_later(self._options.max_age_grace_s, self._connection.close)
