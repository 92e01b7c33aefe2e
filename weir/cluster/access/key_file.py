"""`KeyFile`: the keys of principals in a file, for servers without `weir key` at hand, and for those that mount one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from weir.access.keys.ring import KeyRecord, KeyRing

MAX_BYTES = 4 << 20
"""The size of a file that is read: ten thousand keys and more."""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[KeyRecord, ...] = ()


def parse_keys(data: bytes) -> KeyRing:
    """The keys in the content of a file. Raises ValueError."""
    return KeyRing(msgspec.json.decode(data, type=_Document).keys)


class KeyFile:
    """A file of keys, which only its owner may read. All methods block, and raise OSError, or ValueError if malformed."""

    def __init__(self, path: Path) -> None:
        # The file that a link leads to is replaced, not the link.
        self._path = Path(os.path.realpath(path))

    def ring(self) -> KeyRing:
        """The keys. A file that does not exist has none."""
        try:
            return parse_keys(self._path.read_bytes())
        except FileNotFoundError:
            return KeyRing()

    def change(self, change: Callable[[KeyRing], KeyRing]) -> None:
        """Replaces the keys by those of `change(ring)`. Raises what `change` raises.

        Changes of several processes happen one after the other, and a reader sees the file before or after one.
        """
        with open(f"{self._path}.lock", "a", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._write(msgspec.json.format(msgspec.json.encode(_Document(tuple(change(self.ring()).records)))))

    def _write(self, data: bytes) -> None:
        fd, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)  # mode 0600
        try:
            with open(fd, "wb") as file:
                file.write(data + b"\n")
                file.flush()
                with contextlib.suppress(FileNotFoundError):
                    self._keep_owner(file.fileno())
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            os.unlink(name)
            raise
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _keep_owner(self, fd: int) -> None:
        """Gives the new file the owner and the mode of the one before: a server that runs as another user reads it too."""
        before = os.stat(self._path)
        if (before.st_uid, before.st_gid) != (os.getuid(), os.getgid()):
            os.fchown(fd, before.st_uid, before.st_gid)
        os.fchmod(fd, before.st_mode & 0o777)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
