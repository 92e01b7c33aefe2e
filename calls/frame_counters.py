"""`FrameCounters`: what a caller counts of its frames, at the cost of a few additions for each message."""

from __future__ import annotations

import time
from collections.abc import Callable

from telemetry.histogram import SizeHistogram


class FrameCounters:
    """Sizes of frames, and how long requests are in flight.

    The latter is not measured request by request: the number in flight, summed up over time, is the same sum (Little's
    law). It begins when a request's frame is published and ends when its answer has come.
    """

    __slots__ = ("_clock_ns", "_in_flight", "_in_flight_ns", "_since_ns", "frame_bytes", "frame_requests", "last_key")

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._in_flight = 0
        self._in_flight_ns = 0
        self._since_ns = clock_ns()
        self.last_key = 0
        self.frame_bytes = SizeHistogram()
        self.frame_requests = SizeHistogram()

    def sent(self, requests: int, last_key: int, size_bytes: int, in_flight: int) -> None:
        """A frame was published, whose last request has this key; so many requests are in flight now."""
        self.frame_requests.add(requests)
        self.frame_bytes.add(size_bytes)
        if last_key > self.last_key:
            self.last_key = last_key
        self.changed(in_flight)

    def changed(self, in_flight: int) -> None:
        """So many requests are in flight from now on."""
        now_ns = self._clock_ns()
        self._in_flight_ns += self._in_flight * (now_ns - self._since_ns)
        self._since_ns = now_ns
        self._in_flight = in_flight

    @property
    def in_flight_us(self) -> int:
        """How long all requests together have been in flight by now."""
        return (self._in_flight_ns + self._in_flight * (self._clock_ns() - self._since_ns)) // 1000
