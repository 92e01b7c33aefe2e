"""The scheduler's clock: `now_us`, `at_unix_ms`, and `DeadlineTimer`, which wakes the event loop at a microsecond.

Policies use monotonic microseconds. Event loops round their timers to whole milliseconds: uvloop calls back at once what
is due within half of one, so that a queue delay of 100 us becomes a busy loop, and one of 600 us takes 1100. Linux has
timers that are files (timerfd), which a loop can watch like a socket. Elsewhere the loop's own timer is used.
Source: timerfd_create(2).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import struct
import time
from collections.abc import Callable

from weir.runtime.log_limiter import LogLimiter

_limited = LogLimiter(logging.getLogger("weir.scheduler"))

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_NEVER = 0
_MAX_AHEAD_US = 10 * 365 * 24 * 3600 * 1_000_000

_libc = ctypes.CDLL(None, use_errno=True)
_has_timerfd = hasattr(_libc, "timerfd_create")


def now_us() -> int:
    """Returns the time of the policy clock: monotonic microseconds."""
    return time.monotonic_ns() // 1000


def at_unix_ms(unix_ms: int) -> int:
    """Converts unix milliseconds to the policy clock; the result is at least 1 and at most ten years ahead."""
    return max(1, now_us() + min(unix_ms * 1000 - time.time_ns() // 1000, _MAX_AHEAD_US))


class DeadlineTimer:
    """Calls `on_time` in the running event loop once for each time it is set to; times are monotonic microseconds."""

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._at_us = _NEVER
        self._file = -1
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_us: int | None) -> None:
        """Expires at `at_us` instead of the time set before; None: not at all.

        If the process has too many open files for a timer file, the precision is a millisecond.
        """
        if (at_us or _NEVER) != self._at_us:
            self._at_us = at_us or _NEVER
            if self._timer is not None or not self._set_file():
                self._set_loop_timer()

    def close(self) -> None:
        """Stops the timer for good."""
        self.set(None)
        if self._file >= 0:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _set_file(self) -> bool:
        """Sets the timer file; returns False if there is none."""
        if not _has_timerfd:
            return False
        if self._file < 0:
            if self._at_us == _NEVER:
                return True
            try:
                self._file = _checked(_libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC))
            except OSError as error:
                _limited.warning("no timer", "no timer file available, timers are rounded to milliseconds: %s", error)
                return False
            asyncio.get_running_loop().add_reader(self._file, self._on_file)
        seconds, us = divmod(self._at_us, 1_000_000)
        _checked(_libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, _itimerspec(seconds, us * 1000), None))
        return True

    def _on_file(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return  # it expired, and was set again before the loop got here
        self._expire()

    def _set_loop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._at_us != _NEVER:
            wait_s = max(0.0, self._at_us / 1e6 - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _expire(self) -> None:
        self._at_us = _NEVER
        self._on_time()


def _itimerspec(seconds: int, nanoseconds: int) -> bytes:
    """Returns a `struct itimerspec` without interval."""
    return struct.pack("@4l", 0, 0, seconds, nanoseconds)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
