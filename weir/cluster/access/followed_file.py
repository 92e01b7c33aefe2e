"""`FollowedFile`: what a file says, looked at again and again. A bad edit is reported once; the last good content stays."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("weir.access")

_Signature = tuple[int, int, int, int] | str

T = TypeVar("T")


class FollowedFile(Generic[T]):
    """One file of at most `max_bytes`. `what` names it in errors and in the log.

    `parse` reads its bytes in a thread, and raises ValueError for content that can't be used.
    """

    def __init__(self, what: str, path: str, max_bytes: int, parse: Callable[[bytes], T]) -> None:
        self.path = path
        self._what = what
        self._max_bytes = max_bytes
        self._parse = parse
        self._seen: _Signature | None = None

    async def start(self) -> T:
        """What the file says. Raises ValueError, which names the file, if it can't be read or used."""
        try:
            self._seen = _signature(self.path)
            return await asyncio.to_thread(self._read)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self._what} {self.path}{_reason(error)}") from error

    async def changed(self) -> T | None:
        """What the file says now; None if that is what it said before, or can't be used, which is logged once."""
        seen: _Signature
        try:
            seen = _signature(self.path)
            if seen == self._seen:
                return None
            content = await asyncio.to_thread(self._read)
            if _signature(self.path) != seen:
                return None  # it is being written, and is read at the next look
        except (OSError, ValueError, RecursionError) as error:
            reason = _reason(error)
            # A file that can't even be looked at has no signature: then the reason stands for it.
            seen = reason if isinstance(error, OSError) else seen
            if seen != self._seen:
                logger.error("%s %s%s; what it said before stays in force", self._what, self.path, reason)
            self._seen = seen
            return None
        self._seen = seen
        logger.info("%s %s has changed, and is in force", self._what, self.path)
        return content

    def _read(self) -> T:
        with open(self.path, "rb") as file:
            data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise ValueError(f"it has more than {self._max_bytes} bytes")
        return self._parse(data)


def _signature(path: str) -> _Signature:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f" can't be read: {error.strerror or error}"
    return ": it has too many levels" if isinstance(error, RecursionError) else f": {error}"
