"""`LockedFolder`: a folder that belongs to a process for as long as that runs. Later processes remove those of killed ones.

`is_held` returns whether another process holds a folder: by its lock, which the kernel releases however the process ends,
and not by a process id, which another process may have by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".lock"
"""The file in a `LockedFolder` on which its process holds the lock."""

_ATTEMPTS = 10


class LockedFolder:
    """A new folder `path` with a random name after `prefix`, in `parent` or in the folder of temporary files.

    Its process holds a lock on it, which the kernel releases however the process ends. Raises OSError when the folder
    can't be created.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self._is_locked():
                return
            os.close(self._lock)
        raise OSError(f"other processes removed each of {_ATTEMPTS} new folders at once")

    def _is_locked(self) -> bool:
        """Whether this process has the lock. Another one may have locked the folder first, and removed it as abandoned."""
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK))
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
            lock = os.open(root / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(lock)


def is_held(folder: Path, lock: str = LOCK) -> bool:
    """Whether a process holds the lock `lock` in `folder`; False if there is none, or none that this user may read."""
    try:
        fd = os.open(folder / lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that processes that ask at the same time do not take each other for the holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False
