"""Signals as data: handlers do nothing, the numbers arrive on a file descriptor that a selector can wait on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any


class SignalQueue:
    """While entered, the given signals are queued instead of acted upon. Main thread only."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = tuple(numbers)
        self._previous: dict[signal.Signals, Any] = {}
        self._read_fd = self._write_fd = self._previous_wakeup_fd = -1

    def __enter__(self) -> SignalQueue:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _ignore) for number in self._numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """Readable while a signal waits."""
        return self._read_fd

    def take(self) -> list[signal.Signals]:
        """The signals that have arrived since the last call."""
        try:
            numbers = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._numbers]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Python writes the signal's number to the wake-up descriptor by itself."""
