"""`LockedFolder`: a folder for as long as its process lives; what a killed process has left behind the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = ".lock"
_ATTEMPTS = 10


class LockedFolder:
    """A new folder `path`, of a name of chance that begins with `prefix`, in `parent` or where temporary files lie.

    It is locked by its process, however that ends. Raises OSError when it can't be made.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self._is_there():
                return
            os.close(self._lock)
        raise OSError(f"other processes removed each of {_ATTEMPTS} new folders at once")

    def _is_there(self) -> bool:
        """Whether the folder is locked: another process may have locked it first, taken it for left, and removed it."""
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / _LOCK))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Gives the folder up, with everything in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left_folders(prefix: str, parent: Path | None = None) -> None:
    """Removes folders of processes that have died."""
    for root in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = os.open(root / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(lock)
