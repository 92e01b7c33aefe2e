"""`AbuseGuard`: limits frames that only cause work; ends the connections of abusive peers (RFC 9113, section 10.5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized

from weir.access.limits.token_bucket import TokenBucket
from weir.gateway.http2.frames import Http2ConnectionError, Http2ErrorCode
from weir.gateway.http2.options import Http2Options

MAX_IDLE_FRAMES = 1000
"""Frames without a request (pings, settings, empty data, ...) that a peer may send until something is answered."""
IDLE_FRAMES_A_STREAM = 16
"""How many more for each open stream: gRPC clients widen each stream's window several times before its first response."""

RESETS_AT_ONCE = 1000
RESETS_PER_S = 200.0
"""The rate of streams that end before their response has been sent (rapid reset, CVE-2023-44487)."""

_PING_INTERVAL_WITHOUT_CALLS_S = 7200.0


class AbuseGuard:
    """The counters of one peer, whose open streams are `streams`.

    Each `count_…` method raises Http2ConnectionError (ENHANCE_YOUR_CALM) when the limit is exceeded.
    """

    __slots__ = (
        "_clock",
        "_idle_frames",
        "_last_ping_s",
        "_options",
        "_ping_strikes",
        "_resets",
        "_streams",
        "responded",
    )

    def __init__(self, options: Http2Options, clock: Callable[[], float], streams: Sized) -> None:
        self._options = options
        self._clock = clock
        self._streams = streams
        self._idle_frames = 0
        self._last_ping_s = -math.inf
        self._ping_strikes = 0
        self._resets = TokenBucket(RESETS_PER_S, 0.0, RESETS_AT_ONCE, RESETS_AT_ONCE)
        self.responded = False
        """Set when part of a response is sent: this resets the counters."""

    def count_idle_frame(self) -> None:
        """Counts a frame without a request."""
        self._forgive()
        self._idle_frames += 1
        if self._idle_frames > MAX_IDLE_FRAMES + IDLE_FRAMES_A_STREAM * len(self._streams):
            raise Http2ConnectionError(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many frames without a request")

    def count_reset(self) -> None:
        """Counts a stream that ended early: the peer cancelled it, or violated the protocol on it."""
        if not self._resets.take(1, 1, self._clock()):
            raise Http2ConnectionError(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many cancelled streams")

    def count_ping(self, has_calls: bool) -> None:
        """Counts a ping: gRPC clients may not send keepalives more often than the server allows (gRFC A8)."""
        self.count_idle_frame()
        options, now_s = self._options, self._clock()
        interval_s = options.min_ping_interval_s
        if not (has_calls or options.keepalive_permit_without_calls):
            interval_s = _PING_INTERVAL_WITHOUT_CALLS_S
        if now_s - self._last_ping_s < interval_s:
            self._ping_strikes += 1
            if self._ping_strikes > options.max_ping_strikes > 0:
                raise Http2ConnectionError(Http2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_ping_s = now_s

    def _forgive(self) -> None:
        if self.responded:
            self.responded = False
            self._idle_frames = 0
            self._ping_strikes = 0
            self._last_ping_s = -math.inf
