"""`Alarm`: wakes the event loop at a microsecond.

Event loops round their timers to whole milliseconds: uvloop calls back at once what is due within half of one, so that a
queue delay of 100 us becomes a busy loop, and one of 600 us takes 1100. Linux has timers that are files (timerfd), which
a loop can watch like a socket; elsewhere the loop's own timer has to do.
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

from runtime.log_limiter import LogLimiter

_limited = LogLimiter(logging.getLogger("weir.scheduler"))

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_NEVER = 0

_libc = ctypes.CDLL(None, use_errno=True)
_has_timerfd = hasattr(_libc, "timerfd_create")


class Alarm:
    """Calls `on_time` in the running event loop, once for each time it is set to; times are microseconds, monotonic."""

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._at_us = _NEVER
        self._file = -1
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_us: int | None) -> None:
        """Goes off at `at_us` instead of the time set before; not at all for None.

        Where no file is to be had, for the process has too many open, it goes off in a millisecond's precision.
        """
        if (at_us or _NEVER) != self._at_us:
            self._at_us = at_us or _NEVER
            if self._timer is not None or not self._set_file():
                self._set_loop_timer()

    def close(self) -> None:
        """Never goes off again."""
        self.set(None)
        if self._file >= 0:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _set_file(self) -> bool:
        """Whether the file is set to the time."""
        if not _has_timerfd:
            return False
        if self._file < 0:
            if self._at_us == _NEVER:
                return True
            try:
                self._file = _checked(_libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC))
            except OSError as error:
                _limited.warning("no timer", "no timer file, timers are rounded to milliseconds: %s", error)
                return False
            asyncio.get_running_loop().add_reader(self._file, self._on_file)
        seconds, us = divmod(self._at_us, 1_000_000)
        _checked(_libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, _itimerspec(seconds, us * 1000), None))
        return True

    def _on_file(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return  # it went off, and was set to another time before the loop came here
        self._go_off()

    def _set_loop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._at_us != _NEVER:
            wait_s = max(0.0, self._at_us / 1e6 - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_off)

    def _go_off(self) -> None:
        self._at_us = _NEVER
        self._on_time()


def _itimerspec(seconds: int, nanoseconds: int) -> bytes:
    """A `struct itimerspec` without interval."""
    return struct.pack("@4l", 0, 0, seconds, nanoseconds)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
