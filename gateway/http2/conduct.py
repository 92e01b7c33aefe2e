"""`Conduct`: how a peer behaves; one that only makes work is sent away (RFC 9113, section 10.5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized

from gateway.http2.allowance import Allowance
from gateway.http2.faults import ConnectionFault, FaultCode
from gateway.http2.options import Http2Options

MAX_IDLE_FRAMES = 1000
"""Frames that ask for nothing (pings, settings, empty data, ...) until something is answered."""
IDLE_FRAMES_A_STREAM = 16
"""How many more for each open stream: gRPC's clients widen each stream's window several times before its first answer."""

RESETS_AT_ONCE = 1000
RESETS_PER_S = 200.0
"""Streams that end before their response has been sent: a caller may give up, but not for a living (CVE-2023-44487)."""

_PING_INTERVAL_WITHOUT_CALLS_S = 7200.0


class Conduct:
    """What one peer has done, which has `streams` open.

    Each `count` raises ConnectionFault (ENHANCE_YOUR_CALM) when it was once too often.
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
        self._resets = Allowance(RESETS_AT_ONCE, RESETS_PER_S)
        self.responded = False
        """Set when part of a response is sent: what came before is forgiven."""

    def count_idle_frame(self) -> None:
        """A frame came that asks for nothing."""
        self._forgive()
        self._idle_frames += 1
        if self._idle_frames > MAX_IDLE_FRAMES + IDLE_FRAMES_A_STREAM * len(self._streams):
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")

    def count_reset(self) -> None:
        """A stream ended early: the peer gave it up, or did what a stream is ended for."""
        if not self._resets.spend(self._clock()):
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "too many streams given up")

    def count_ping(self, has_calls: bool) -> None:
        """A ping came: gRPC clients may not keep alive more often than the server allows (gRFC A8)."""
        self.count_idle_frame()
        options, now_s = self._options, self._clock()
        interval_s = options.min_ping_interval_s
        if not (has_calls or options.keepalive_permit_without_calls):
            interval_s = _PING_INTERVAL_WITHOUT_CALLS_S
        if now_s - self._last_ping_s < interval_s:
            self._ping_strikes += 1
            if self._ping_strikes > options.max_ping_strikes > 0:
                raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_ping_s = now_s

    def _forgive(self) -> None:
        if self.responded:
            self.responded = False
            self._idle_frames = 0
            self._ping_strikes = 0
            self._last_ping_s = -math.inf
