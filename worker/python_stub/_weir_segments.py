"""Shared-memory segments of gateways and workers, as the process of a model finds and reads them."""

from __future__ import annotations

import os
import re
import struct

import numpy as np

_NAME = re.compile(r"weir-[A-Za-z0-9_.-]+")
_FOLDER = "/dev/shm/"  # noqa: S108  # where Linux keeps POSIX shared memory
_GENERATION = struct.Struct("<Q")


class Segments:
    """Opens segments by name, read-only, and keeps them open while they have that name. Used by one thread."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def open(self, name: str) -> int:
        """The file descriptor of a segment, which stays this object's.

        Raises ValueError for what can't be the name of one, OSError for one that is gone.
        """
        fd = self._fds.get(name)
        if fd is not None and os.fstat(fd).st_nlink:
            return fd
        if not _NAME.fullmatch(name):
            raise ValueError("not a shared-memory segment of this server")
        self._forget_removed()
        fd = os.open(_FOLDER + name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._fds[name] = fd
        return fd

    def copy(self, name: str, slot: int, generation: int, offset: int, size: int) -> np.ndarray:
        """The payload at (`offset`, `size`), copied out as uint8; `slot` is where its generation number stands.

        Raises ValueError, or OSError, when it is not there, or not any more.
        """
        fd = self.open(name)
        content = np.empty(size, np.uint8)
        view, position = memoryview(content), 0
        while position < size:
            count = os.preadv(fd, [view[position:]], offset + position)
            if count == 0:
                raise ValueError("a payload lies outside of its segment")
            position += count
        # After the copy: so it proves that all of it was this payload's.
        if os.pread(fd, _GENERATION.size, slot) != _GENERATION.pack(generation):
            raise ValueError("the payload was given up before it was read")
        return content

    def _forget_removed(self) -> None:
        for name, fd in list(self._fds.items()):
            if not os.fstat(fd).st_nlink:
                os.close(self._fds.pop(name))
