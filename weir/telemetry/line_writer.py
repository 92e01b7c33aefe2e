"""`LineWriter`: appends lines to a file, or to standard output, from a thread. Used by the access log and the audit log.

Several processes may append to one file: each batch of lines is one write at its end. A file that was renamed or removed
(logrotate) is opened again within a second. A file that can't be written, as on a full disk, is logged once; lines are
dropped and counted until it can be written again. Only the thread waits for the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from weir.schemas.core.errors import invalid

logger = logging.getLogger("weir.telemetry")

Entry = TypeVar("Entry")

STDOUT = "-"
"""The path that stands for standard output."""

MAX_WAITING = 65_536
"""Entries that wait for the thread; further ones are dropped and counted."""

WRITE_INTERVAL_S = 0.1
"""How long an entry waits at most before it is written."""

_CHECKS_EVERY = 10  # writing intervals between two looks at whether the file was renamed
_MODE = 0o640


class LineWriter(Generic[Entry]):
    """Writes entries as the lines that `encode` makes of a batch; each ends with a newline. `option` names it in the log.

    Opens the file at once. Raises WeirError (INVALID_ARG) if it can't be written. `put` is for one event loop.
    """

    def __init__(self, option: str, path: str, encode: Callable[[Sequence[Entry]], bytes]) -> None:
        self._option = option
        self._path = path
        self._encode = encode
        self._waiting: deque[Entry] = deque()
        self._turn = 0
        self._is_failing = False
        self._is_cut = False  # the last write ended within a line
        self._ends = threading.Event()
        self.dropped = 0
        """Entries that were dropped: too many waited, or the file could not be written."""
        try:
            self._fd = self._open()
        except OSError as error:
            raise invalid(f"{option} {path} can't be written: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name=option.removeprefix("--"), daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Has `entry` written soon, or drops it if too many wait. Never waits."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(entry)
        else:
            self.dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what waits, for at most `timeout_s` seconds, and ends the thread."""
        self._ends.set()
        self._thread.join(timeout_s)

    def write_waiting(self) -> None:
        """Writes the entries that wait. For the thread, and for tests."""
        self._turn += 1
        if self._turn % _CHECKS_EVERY == 0 or self._is_failing:
            self._follow_rename()
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not waiting:
            return
        data = self._encode(waiting)
        try:
            self._write(b"\n" + data if self._is_cut else data)
        except OSError as error:
            self.dropped += len(waiting)
            if not self._is_failing:
                self._is_failing = True
                logger.error("%s can't be written, its lines are dropped until it can: %s", self._option, error)
        else:
            self._is_cut = False
            if self._is_failing:
                self._is_failing = False
                logger.warning("%s is written again; %d lines were dropped so far", self._option, self.dropped)

    def _run(self) -> None:
        while not self._ends.wait(WRITE_INTERVAL_S):
            self.write_waiting()
        self.write_waiting()
        if self._path != STDOUT:
            os.close(self._fd)

    def _open(self) -> int:
        if self._path == STDOUT:
            return 1
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = os.write(self._fd, rest)
            self._is_cut = rest[written - 1] != 0x0A if written else self._is_cut
            rest = rest[written:]

    def _follow_rename(self) -> None:
        """Opens the file anew if its path leads elsewhere by now. The old one is kept while that is impossible."""
        if self._path == STDOUT:
            return
        with contextlib.suppress(OSError):
            own = os.fstat(self._fd)
            try:
                found = os.stat(self._path)
            except FileNotFoundError:
                found = None
            if found is None or (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino):
                opened = self._open()
                os.close(self._fd)
                self._fd = opened
