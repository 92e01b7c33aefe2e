"""`LockedFolder`: a temporary folder that belongs to a process. Folders of killed processes are removed by later ones."""

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
    """A new folder `path` with a random name after `prefix`, in `parent` or in the folder of temporary files.

    Its process holds a lock on it, which the kernel releases however the process ends. Raises OSError when the folder
    can't be created.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self._is_locked():
                return
            os.close(self._lock)
        raise OSError(f"other processes removed each of {_ATTEMPTS} new folders at once")

    def _is_locked(self) -> bool:
        """Whether this process has the lock. Another one may have locked the folder first, and removed it as abandoned."""
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / _LOCK))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Removes the folder with everything in it. May be called repeatedly."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned_folders(prefix: str, parent: Path | None = None) -> None:
    """Removes the folders with this prefix whose processes have ended."""
    for root in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = os.open(root / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(lock)
