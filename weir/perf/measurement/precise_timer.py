"""`PreciseTimer`: waits until a point in time with a resolution of microseconds.

Event loops round timers to milliseconds, which would distort an open loop of fast requests. On Linux a timer of the kernel
(timerfd_create(2)) wakes the loop instead; elsewhere the loop's own timers are used.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys

_CLOEXEC_NONBLOCK = 0o2000000 | 0o4000
_CLOCK_MONOTONIC = 1


class PreciseTimer:
    """Belongs to the running event loop. One wait at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1 if self._libc is None else self._libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK)
        self._waiting: asyncio.Future[None] | None = None
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._expired)

    async def sleep(self, seconds: float) -> None:
        """Waits so long; for 0 and less one turn of the event loop, in which other tasks run."""
        if seconds <= 0 or self._fd < 0 or self._libc is None:
            await asyncio.sleep(max(0.0, seconds))
            return
        self._waiting = self._loop.create_future()
        whole_s = int(seconds)
        # struct itimerspec: no repetition, then seconds and nanoseconds, of which 0 would disarm the timer.
        setting = struct.pack("@llll", 0, 0, whole_s, max(1, int((seconds - whole_s) * 1e9)))
        self._libc.timerfd_settime(self._fd, 0, setting, None)
        await self._waiting

    def close(self) -> None:
        """Releases the timer."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
