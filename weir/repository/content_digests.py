"""`ContentDigests`: digests of what models consist of, for the records of the requests that they have run.

The digest of a version is one of the contents and paths of its files, of those that all versions share, and of its
configuration: the same on every host, and after files were copied or touched. Contents are read once for each state of a
file (its place on disk, time of modification and size). Beyond `MAX_READ_BYTES` of a version, files are represented by size
and time of modification instead, because reading them would take as long as loading them.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from weir.repository.layout import Files, Fingerprint
from weir.runtime.containment import contained
from weir.schemas.config.model_config import ModelConfig

MAX_READ_BYTES = 4 << 30
"""Contents of one version that are read for its digest: some seconds of a processor, while the model loads."""

MAX_KNOWN = 10_000
"""Files whose digests are kept; those that were needed first are dropped."""

_State = tuple[int, int, int, int]


class ContentDigests:
    """Computes digests in threads of its own, and keeps those of files. Thread-safe."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, "digests")
        self._lock = threading.Lock()
        self._known: OrderedDict[_State, str] = OrderedDict()
        self.read_bytes = 0

    def start(self, fingerprint: Fingerprint, version: int, config: ModelConfig) -> Future[str]:
        """Begins to compute the digest of a version of the folder that `fingerprint` describes.

        The result is "" if that fails unexpectedly.
        """
        return self._pool.submit(self._of_version, fingerprint, version, config.model_dump_json())

    @contained(on_error="_failed")
    def _of_version(self, fingerprint: Fingerprint, version: int, config: str) -> str:
        left = MAX_READ_BYTES
        digest = hashlib.blake2b(config.encode(), digest_size=16)
        folders = (
            (fingerprint.path / str(version), fingerprint.versions.get(version, ())),
            (
                fingerprint.path,
                fingerprint.shared,
            ),
        )
        for folder, files in folders:
            digest.update(repr(len(files)).encode())
            for row, content in self._contents(folder, files, left):
                left -= row[2]
                digest.update(repr((row[0], content)).encode())
        return digest.hexdigest()

    def _failed(self, _error: Exception, *_: object) -> str:
        return ""

    def _contents(self, folder: Path, files: Files, left: int) -> list[tuple[tuple[str, int, int], str]]:
        found = []
        for row in files:
            path, modified_ns, size = row
            left -= size
            content = self._of_file(folder / path) if left >= 0 else ""
            found.append((row, content or f"{size} bytes of {modified_ns}"))
        return found

    def _of_file(self, path: Path) -> str:
        """The digest of a file's content; "" where it can't be read, or is no ordinary file."""
        try:
            with open(path, "rb", opener=_open_ordinary) as file:
                status = os.fstat(file.fileno())
                state = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
                with self._lock:
                    known = self._known.get(state)
                if known is not None:
                    return known
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""
        with self._lock:
            self.read_bytes += status.st_size
            self._known[state] = digest
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return digest


def _open_ordinary(path: str, flags: int) -> int:
    # A named pipe would block, and a device might not end.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no ordinary file")
    return descriptor
