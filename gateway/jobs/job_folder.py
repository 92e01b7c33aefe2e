"""`JobFolder`: a job's hold on its output folder: nothing of others is overwritten, and one process at a time writes.

File `.weir-job` in the folder says whose it is. Who writes holds a lock on it (flock), which the kernel gives back when
the process ends, however it ends: a runner whose lease is gone and who doesn't know it yet keeps others out that way.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import orjson

from schemas.errors import WeirError, invalid, unavailable

MARK = ".weir-job"
_MAX_MARK_BYTES = 64 << 10


class JobFolder:
    """See the module. All methods block on the file system, and raise OSError where it fails."""

    def __init__(self, path: Path, job_id: str) -> None:
        self.path = path
        self._job_id = job_id
        self._fd = -1

    def check(self) -> None:
        """Raises WeirError (INVALID_ARG) unless the folder is missing, empty, or the job's own."""
        try:
            names = {entry.name for entry in os.scandir(self.path)}
        except FileNotFoundError:
            return
        if not names:
            return
        owner = self._read_mark().get("id") if MARK in names else None
        if owner is None and names == {MARK}:
            return  # whoever was to write the mark was killed
        if owner != self._job_id:
            what = f"belongs to job {owner}" if isinstance(owner, str) else "is not empty"
            raise invalid(f"the output folder '{self.path}' {what}: nothing there is overwritten, name another one")

    def claim(self, fingerprint: str) -> None:
        """Makes the folder, marks it, and locks it; to be released.

        Raises WeirError: UNAVAILABLE while another process writes there, INVALID_ARG when the folder is somebody else's,
        or the input's `fingerprint` is not what it was when the job began.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.check()
        fd = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._compare(fd, fingerprint)
        except BlockingIOError as error:
            os.close(fd)
            raise unavailable("another process still writes to the output folder") from error
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Gives it back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _compare(self, fd: int, fingerprint: str) -> None:
        data = os.pread(fd, _MAX_MARK_BYTES, 0)
        if data:
            mark = _parsed(data)
            if mark.get("id") != self._job_id:
                raise invalid(f"the output folder '{self.path}' belongs to another job")
            if mark.get("input") != fingerprint:
                raise invalid("the input has changed since the job began: begin a new job")
            return
        os.pwrite(fd, orjson.dumps({"id": self._job_id, "input": fingerprint}), 0)
        os.fsync(fd)

    def _read_mark(self) -> dict[str, object]:
        try:
            return _parsed((self.path / MARK).read_bytes())
        except (OSError, WeirError):
            return {}


def _parsed(data: bytes) -> dict[str, object]:
    try:
        mark = orjson.loads(data)
    except ValueError as error:
        raise invalid(f"file {MARK} of the output folder can't be read") from error
    return mark if isinstance(mark, dict) else {}
