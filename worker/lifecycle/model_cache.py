"""`ModelCache`: the models of a repository that is not local, as this host has fetched them.

```text
store-HASH/           one repository, by a hash of its address. It exists once the repository was listed
  MODEL/              .lock is held while a worker changes it: workers that share a cache fetch each file once
    SNAPSHOT/         the model as it was listed once, by a hash of that listing
      files/          the model's folder
      parts/          files that are being downloaded
      snapshot.json   what was listed, with the hash of each content: it is written when the folder is complete
    last              the name of the snapshot that was fetched last, which serves while the repository can't be read
weir-mirror-*/        one worker; removed after its process has ended
  models/             links to the snapshots that are its model repository
```

A link in the folder of a worker keeps a snapshot; others are removed when room is needed, unless they may still be read.
The time of a snapshot's folder is that of its last use. A model changes by one `rename` of its link. Files that a new
snapshot has in common with an older one are hard links. Modification times follow from the contents, so that all workers
see the same changes in the same files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path

import msgspec

from weir.repository.stores.store import FOLDER_MARK, StoredFile, StoredModel
from weir.runtime.folders.locked import LockedFolder, remove_abandoned_folders
from weir.schemas.core.errors import unavailable
from weir.schemas.wire.model_control import is_inside

logger = logging.getLogger("weir.worker")

PREFIX = "weir-mirror-"
"""The prefix of the names of workers' folders."""

SHA256_TAG = "sha256:"
"""What a tag begins with that is the hash of the content, and not only an ETag."""

_UNUSED_S = 7 * 86_400.0
_READ_S = 600.0
_YEAR_2001_NS = 10**18
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_PIECE_BYTES = 1 << 20


class Snapshot(msgspec.Struct, frozen=True):
    """A complete model: as it was listed, and the SHA-256 of each file's content by its path."""

    model: StoredModel
    digests: dict[str, str]


@dataclass(slots=True)
class Draft:
    """A snapshot in progress: the folder, and the hashes of the files that it has. The process holds the model's lock."""

    model: StoredModel
    folder: Path
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[StoredFile]:
        """The files that are to be downloaded."""
        return [file for file in self.model.files if file.path not in self.digests]

    def part(self, file: StoredFile) -> Path:
        """Where the file is while it is incomplete."""
        return self.folder / "parts" / _hash(file.path)

    def place(self, file: StoredFile, digest: str) -> None:
        """Moves the complete part, whose content has this hash, to where the file belongs. Blocking; raises OSError."""
        part = self.part(file)
        os.chmod(part, 0o444)
        modified_ns = _YEAR_2001_NS + int(digest, 16) % (1 << 58)
        os.utime(part, ns=(modified_ns, modified_ns))
        os.replace(part, self.folder / "files" / file.path)
        self.digests[file.path] = digest


class ModelCache:
    """The models of the repository with this address. `models` is a folder of those that this worker has installed.

    With a folder, models stay there, and several workers may share them; otherwise they are removed with this process. They
    take at most `limit_bytes` (0: what leaves a tenth of the disk free). All methods are blocking, and may raise OSError.
    """

    def __init__(self, address: str, folder: Path | None = None, limit_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._temporary = LockedFolder(PREFIX) if folder is None else None
        self._root = (self._temporary.path if folder is None else folder).absolute()  # type: ignore[union-attr]
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mark_used()
        remove_abandoned_folders(PREFIX, self._root)
        self._own = LockedFolder(PREFIX, self._root)
        self._store = self._root / f"store-{_hash(address)}"
        self.models = self._own.path / "models"
        self.models.mkdir()
        self._lock = threading.Lock()
        self._intact: set[tuple[int, int, int]] = set()
        for snapshot in self._unused(_UNUSED_S):
            self._discard(snapshot)

    def close(self) -> None:
        """Removes what this worker has installed; the snapshots in a folder stay."""
        self._mark_used()
        self._own.remove()
        if self._temporary is not None:
            self._temporary.remove()

    # Listings

    @property
    def was_listed(self) -> bool:
        """Whether the repository was listed successfully with this cache before."""
        return self._store.is_dir()

    def mark_listed(self) -> None:
        """Remembers that the repository was listed."""
        self._store.mkdir(exist_ok=True)

    def listings(self) -> dict[str, StoredModel]:
        """All models as they were last fetched, by name."""
        found = (_read(last.parent / last.read_text()) for last in sorted(self._store.glob("*/last")))
        return {snapshot.model.name: snapshot.model for snapshot in found if snapshot is not None}

    # Models

    def lock(self, name: str) -> BufferedRandom | None:
        """The right to change the model's snapshots until it is closed; None while another worker has it."""
        folder = self._store / name
        folder.mkdir(parents=True, exist_ok=True)
        return _lock(folder)

    def begin(self, model: StoredModel) -> Draft:
        """The model's snapshot with all files that are here, and room for the others.

        These are the files of complete snapshots that are intact, and those that a killed process has downloaded, as far as
        their tags can be compared. Raises UNAVAILABLE where the others have no room, and for a path that leads outside.
        """
        if not all(is_inside(file.path) for file in model.files):
            raise unavailable(f"model '{model.name}' has a file with a path outside of its folder")
        folder = self._store / model.name / _hash(msgspec.json.encode(model).decode())
        draft = Draft(model, folder)
        shutil.rmtree(folder / "parts", ignore_errors=True)
        (folder / "parts").mkdir(parents=True)
        known = self._known(model.name)
        for file in model.files:
            path = folder / "files" / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name != FOLDER_MARK or file.size_bytes:
                self._take(draft, file, path, known.get(file, {}))
            else:
                draft.digests[file.path] = ""
        with self._lock:
            self._make_room(sum(file.size_bytes for file in draft.missing), folder)
            for file in draft.missing:
                with draft.part(file).open("wb") as part:
                    part.truncate(file.size_bytes)  # so that other downloads count it
        return draft

    def _known(self, name: str) -> dict[StoredFile, dict[Path, str]]:
        """Where each file of the model's complete snapshots is, with the hash of its content."""
        known: dict[StoredFile, dict[Path, str]] = {}
        for path in (self._store / name).glob("*/snapshot.json"):
            if (snapshot := _read(path.parent)) is not None:
                for file in snapshot.model.files:
                    known.setdefault(file, {})[path.parent / "files" / file.path] = snapshot.digests[file.path]
        return known

    def _take(self, draft: Draft, file: StoredFile, path: Path, known: Mapping[Path, str]) -> None:
        """Adds the file to the draft if its content is here, intact."""
        if path.exists() and path not in known and path.stat().st_size == file.size_bytes:
            digest, is_right = checked_digest(path, file.tag)
            if is_right:
                draft.digests[file.path] = digest
                return
        for source, digest in sorted(known.items(), key=lambda item: item[0] != path):
            if self._is_intact(source, digest):
                if source != path:
                    path.unlink(missing_ok=True)
                    _copy(source, path)
                draft.digests[file.path] = digest
                return
            if source == path:
                logger.warning("file '%s' was changed in the model cache; it is fetched again", file.path)
        path.unlink(missing_ok=True)

    def _is_intact(self, path: Path, digest: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            state = status.st_ino, status.st_mtime_ns, status.st_size
            if state in self._intact or checked_digest(path, SHA256_TAG + digest)[1]:
                self._intact.add(state)
                return True
        return False

    def install(self, draft: Draft) -> None:
        """Completes the snapshot, and replaces the worker's link to the model."""
        model, folder = draft.model, draft.folder
        shutil.rmtree(folder / "parts")
        for file in model.files:
            with contextlib.suppress(FileNotFoundError):
                status = (folder / "files" / file.path).stat()
                self._intact.add((status.st_ino, status.st_mtime_ns, status.st_size))
        (folder / "files").mkdir(exist_ok=True)
        _write(folder / "snapshot.json", msgspec.json.encode(Snapshot(model, draft.digests)))
        _write(folder.parent / "last", folder.name.encode())
        os.utime(folder)
        self._link(model.name, folder)

    def remove(self, name: str) -> None:
        """Removes the model, which the repository has no longer."""
        (self._store / name / "last").unlink(missing_ok=True)
        self._link(name, None)

    def _link(self, name: str, folder: Path | None) -> None:
        link = self.models / name
        with contextlib.suppress(FileNotFoundError):
            os.utime(Path(os.readlink(link)).parent)
        if folder is None:
            link.unlink(missing_ok=True)
        else:
            _point(link, folder / "files")
        if self._temporary is not None:
            for snapshot in self._unused(_READ_S):
                self._discard(snapshot, folder)

    # Room

    def _make_room(self, size_bytes: int, draft: Path) -> None:
        disk = shutil.disk_usage(self._root)
        if not size_bytes or (not self._limit_bytes and disk.free - size_bytes > disk.total // 10):
            return
        snapshots = self._root.glob("store-*/*/*")
        used = sum({status.st_ino: status.st_size for path in snapshots for status in _files(path)}.values())
        room = (self._limit_bytes or used + disk.free - disk.total // 10) - used - size_bytes
        for snapshot in self._unused(_READ_S):
            if room >= 0:
                return
            room += self._discard(snapshot, draft)
        if room < 0:
            option = f"--model-cache-byte-size={self._limit_bytes}" if self._limit_bytes else "nine tenths of its disk"
            raise unavailable(f"the model cache is full: it has no room for {size_bytes} bytes within {option}")

    def _unused(self, for_s: float) -> list[Path]:
        """The snapshots that no worker has used for `for_s` seconds, those unused for longest first."""
        used, found = self._used(), []
        for snapshot in self._root.glob("store-*/*/*"):
            with contextlib.suppress(FileNotFoundError):  # another worker has discarded it
                if snapshot.is_dir() and snapshot not in used:
                    found.append((snapshot.stat().st_mtime, snapshot))
        return [snapshot for used_s, snapshot in sorted(found) if used_s < time.time() - for_s]

    def _used(self) -> set[Path]:
        used: set[Path] = set()
        for folder in self._root.glob(f"{PREFIX}*"):
            links: list[str] = []
            with contextlib.suppress(FileNotFoundError):  # its worker has ended
                links = os.listdir(folder / "models")
            for link in links:
                with contextlib.suppress(FileNotFoundError):  # it was replaced
                    used.add(Path(os.readlink(folder / "models" / link)).parent)
        return used

    def _mark_used(self) -> None:
        """Notes that what the workers have was used until now: the folders of those that were killed are removed next."""
        for snapshot in self._used():
            with contextlib.suppress(OSError):
                os.utime(snapshot)

    def _discard(self, snapshot: Path, draft: Path | None = None) -> int:
        """Removes the snapshot unless a worker uses it by now; returns the bytes that its files took alone.

        `draft` is the snapshot that this worker is at, with the lock of its model.
        """
        if snapshot == draft:
            return 0
        is_locked = draft is not None and draft.parent == snapshot.parent
        lock = None if is_locked else _lock(snapshot.parent)
        if lock is None and not is_locked:
            return 0
        with lock or contextlib.nullcontext():
            if snapshot in self._used():
                return 0
            freed = sum(status.st_size for status in _files(snapshot) if status.st_nlink == 1)
            shutil.rmtree(snapshot, ignore_errors=True)
            return freed


def checked_digest(path: Path, tag: str) -> tuple[str, bool]:
    """The SHA-256 of a file's content in hexadecimal, and whether its tag, where that may be a checksum, is the content's.

    Blocking; raises OSError.
    """
    sha256, md5, expected = hashlib.sha256(), hashlib.md5(usedforsecurity=False), _MD5.fullmatch(tag)
    with path.open("rb") as content:
        while piece := content.read(_PIECE_BYTES):
            sha256.update(piece)
            if expected is not None:
                md5.update(piece)
    digest = sha256.hexdigest()
    if tag.startswith(SHA256_TAG):
        return digest, tag == SHA256_TAG + digest
    return digest, expected is None or expected[1] == md5.hexdigest()


def _lock(model: Path) -> BufferedRandom | None:
    lock = (model / ".lock").open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _read(snapshot: Path) -> Snapshot | None:
    """The snapshot in this folder, None if it is not complete."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((snapshot / "snapshot.json").read_bytes(), type=Snapshot)
    return None


def _files(snapshot: Path) -> Iterator[os.stat_result]:
    """The files of a model, complete or not."""
    for folder, _, names in os.walk(snapshot):
        for name in names if Path(folder) != snapshot else ():
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(folder, name))


def _point(link: Path, target: Path) -> None:
    """Makes the link point to the target in one step."""
    new = link.with_name(f".{secrets.token_hex(8)}")
    new.symlink_to(target)
    os.replace(new, link)


def _write(path: Path, content: bytes) -> None:
    """Replaces the file in one step."""
    new = path.with_name(f".{secrets.token_hex(8)}")
    new.write_bytes(content)
    os.replace(new, path)


def _copy(content: Path, path: Path) -> None:
    try:
        os.link(content, path)
    except OSError:  # a file system without hard links
        shutil.copy2(content, path)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
