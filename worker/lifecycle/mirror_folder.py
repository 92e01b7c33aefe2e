"""`MirrorFolder`: the local copy of a repository in NATS or in an object store, made of files stored under their hashes.

The new folder of a model is built from hard links beside the old one, and replaces it in one step. Nothing is written
outside: names and paths are checked, and the only symbolic links are the folder's own. Modification times follow from the
contents, so that all workers see the same changes in the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from weir.repository.paths import check_model_name
from weir.runtime.folders.locked import LockedFolder, remove_abandoned_folders
from weir.schemas.core.errors import unavailable
from weir.schemas.wire.model_control import PushedFile, PushedModel, is_inside

logger = logging.getLogger("weir.worker")

PREFIX = "weir-mirror-"
"""The prefix of the folders' names."""

_UNUSED_S = 7 * 86_400.0
_FORMER_S = 600.0
_NEW_S = 600.0
_YEAR_2001_NS = 10**18


class MirrorFolder:
    """The mirror of one repository. `models` is its folder. All methods are blocking, and may raise OSError.

    With a `cache`, contents are stored there permanently, and several workers may share them; otherwise they are removed
    with this process. Contents take at most `limit_bytes` (0: what leaves a tenth of the disk free): beyond that, those
    that no model uses are removed, the oldest first.
    """

    def __init__(self, cache: Path | None = None, limit_bytes: int = 0) -> None:
        if cache is not None:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_abandoned_folders(PREFIX, cache)
        self._folder = LockedFolder(PREFIX, cache)
        self.root = cache or self._folder.path
        self._contents = self.root / "contents"
        self._limit_bytes = limit_bytes
        self._trees = self._folder.path / "trees"
        self.models = self._folder.path / "models"
        self._checked: set[str] = set()
        self._former: dict[str, tuple[Path, float]] = {}
        self._needed: Counter[str] = Counter()
        self._lock = threading.Lock()
        for folder in (self._contents, self._trees, self.models):
            folder.mkdir(exist_ok=True)
        if cache is not None:
            self._forget_unused(time.time() - _UNUSED_S)

    @contextlib.contextmanager
    def keeping(self, model: PushedModel) -> Iterator[None]:
        """Keeps the contents of the model while the context lasts, whatever happens to other models."""
        with self.holding() as held:
            for file in model.files:
                held.add(file.digest)
            yield

    @contextlib.contextmanager
    def holding(self) -> Iterator[HeldContents]:
        """Keeps the contents that are added to what it yields, while the context lasts."""
        held = HeldContents(self._needed, self._lock)
        try:
            yield held
        finally:
            held.release()

    def place(self, partial: Path, digest: str) -> None:
        """Stores the complete file `partial`, whose content has this hash, in the same file system."""
        _make_immutable(partial, digest)
        os.replace(partial, self._contents / digest)
        self._checked.add(digest)

    def is_stored(self, digest: str) -> bool:
        """Whether there is a content under this hash, intact or not."""
        return (self._contents / digest).exists()

    def make_room(self, size_bytes: int) -> None:
        """Removes contents that no model uses until `size_bytes` more fit. Raises UNAVAILABLE where they do not."""
        disk = shutil.disk_usage(self._contents)
        if not self._limit_bytes and disk.free - size_bytes > disk.total // 10:
            return
        used, unused = 0, []
        with os.scandir(self._contents) as entries:
            for entry in entries:
                status = entry.stat()
                used += status.st_size
                # Another worker may be about to link a content that it has just received.
                if status.st_nlink == 1 and entry.name not in self._needed and status.st_ctime < time.time() - _NEW_S:
                    unused.append((status.st_ctime, status.st_size, entry.name))
        room = (self._limit_bytes or used + disk.free - disk.total // 10) - used - size_bytes
        for _, unused_bytes, name in sorted(unused):
            if room >= 0:
                break
            (self._contents / name).unlink(missing_ok=True)
            room += unused_bytes
        if room < 0:
            option = f"--model-cache-byte-size={self._limit_bytes}" if self._limit_bytes else "nine tenths of its disk"
            raise unavailable(f"the model cache is full: it has no room for {size_bytes} bytes within {option}")

    def has(self, file: PushedFile) -> bool:
        """Whether the content of the file is stored and intact. A content that was changed is removed."""
        return self.has_content(file.digest, file.path)

    def has_content(self, digest: str, shown: str) -> bool:
        """Whether the content of this hash is stored and intact; `shown` is its file's name in the log."""
        path = self._contents / digest
        if digest in self._checked and path.exists():
            return True
        try:
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() == digest:
                    self._checked.add(digest)
                    return True
        except FileNotFoundError:
            return False
        logger.warning("file '%s' was changed in the model cache; it is fetched again", shown)
        path.unlink(missing_ok=True)
        return False

    def receive(self, file: PushedFile) -> IncomingFile:
        """A writer for the content of the file."""
        return IncomingFile(
            self._contents / f".{file.digest}.{secrets.token_hex(4)}", self._contents / file.digest, file
        )

    def install(self, model: PushedModel) -> None:
        """Replaces the model's folder. Raises WeirError for a name or path that leads outside."""
        check_model_name(model.name)
        if not all(map(is_inside, (*(file.path for file in model.files), *model.folders))):
            raise unavailable(f"model '{model.name}' has a file with a path outside of its folder")
        tree = self._trees / secrets.token_hex(
            8
        )  # not the model's name, which may have the maximum length of a file name
        tree.mkdir()
        try:
            for file in model.files:
                path = tree / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                _link(self._contents / file.digest, path)
            for empty in model.folders:
                (tree / empty).mkdir(parents=True, exist_ok=True)
            link = self._trees / f"{tree.name}.link"
            link.symlink_to(tree)
            former = self._tree_of(model.name)
            os.replace(link, self.models / model.name)
        except OSError:
            shutil.rmtree(tree, ignore_errors=True)
            raise
        self._retire(model.name, former)

    def remove(self, name: str) -> None:
        """Removes the model."""
        check_model_name(name)
        former = self._tree_of(name)
        (self.models / name).unlink(missing_ok=True)
        self._retire(name, former)

    def close(self) -> None:
        """Removes the models; contents in a cache stay."""
        self._folder.remove()

    def _tree_of(self, name: str) -> Path | None:
        with contextlib.suppress(OSError):
            return Path(os.readlink(self.models / name))
        return None

    def _retire(self, name: str, former: Path | None) -> None:
        # The replaced folder may still be read: it is removed with the model's next change, or a while later.
        long_ago_s = time.monotonic() - _FORMER_S
        for other, (tree, retired_s) in list(self._former.items()):
            if other == name or retired_s < long_ago_s:
                shutil.rmtree(tree, ignore_errors=True)
                self._former.pop(other, None)
        if former is not None:
            self._former[name] = former, time.monotonic()
        if self._contents.parent == self._folder.path:
            self._forget_unused(time.time() + 1)

    def _forget_unused(self, before_s: float) -> None:
        """Removes contents that have been in no model for long, and are not to be."""
        for path in self._contents.iterdir():
            if path.name in self._needed:
                continue
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_nlink == 1 and status.st_ctime < before_s and not path.name.startswith("."):
                    path.unlink()


class HeldContents:
    """Contents that are kept although no model has them yet. Thread-safe."""

    def __init__(self, needed: Counter[str], lock: threading.Lock) -> None:
        self._needed = needed
        self._lock = lock
        self._digests: set[str] = set()

    def add(self, digest: str) -> None:
        """Keeps the content of this hash until `release`."""
        with self._lock:
            if digest not in self._digests:
                self._digests.add(digest)
                self._needed[digest] += 1

    def release(self) -> None:
        """Keeps the added contents no longer."""
        with self._lock:
            for digest in self._digests:
                self._needed[digest] -= 1
                if not self._needed[digest]:
                    del self._needed[digest]
            self._digests.clear()


class IncomingFile:
    """Writes the content of a file, which is stored under its hash when it is complete."""

    def __init__(self, partial: Path, path: Path, file: PushedFile) -> None:
        self._partial = partial
        self._path = path
        self._file = file
        self._digest = hashlib.sha256()
        self._content = partial.open("xb")

    def write(self, piece: bytes) -> None:
        """Appends the next piece."""
        self._digest.update(piece)
        self._content.write(piece)

    def finish(self) -> None:
        """Stores the content. Raises UNAVAILABLE if it does not have the hash of the pushed file."""
        self._content.close()
        if self._digest.hexdigest() != self._file.digest:
            self.discard()
            raise unavailable(f"the content of file '{self._file.path}' does not match the hash of the pushed file")
        _make_immutable(self._partial, self._file.digest)
        os.replace(self._partial, self._path)

    def discard(self) -> None:
        """Removes an incomplete content. May be called after `finish`."""
        self._content.close()
        self._partial.unlink(missing_ok=True)


def _make_immutable(content: Path, digest: str) -> None:
    """Makes the file read-only, with a modification time that follows from its hash: workers compare files by time."""
    os.chmod(content, 0o444)
    modified_ns = _YEAR_2001_NS + int(digest, 16) % (1 << 58)
    os.utime(content, ns=(modified_ns, modified_ns))


def _link(content: Path, path: Path) -> None:
    try:
        os.link(content, path)
    except OSError:  # a file system without hard links
        shutil.copy2(content, path)
