"""`StoreCache`: what a host knows about the objects of a store: contents by tag, incomplete downloads, the last listing.

All workers of a host share it where they share a cache folder. The contents themselves lie under their hashes in the
`MirrorFolder`, beside those of repositories in NATS.

- `tags/KEY` has the hash of the content of one version of an object; KEY is a hash of its address, size and tag.
- `partial/KEY` is an incomplete download. Its process holds a lock on it; the next process continues where one was killed.
- `listings/STORE/` has each model as it was last fetched, so that a worker starts while the store is unreachable.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from weir.repository.stores.store import StoredFile, StoredModel
from weir.worker.lifecycle.mirror_folder import HeldContents, MirrorFolder

_UNUSED_S = 7 * 86_400.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_PIECE_BYTES = 1 << 20


class StoreCache:
    """The part of a cache that belongs to the store called `store`. All methods are blocking, and may raise OSError."""

    def __init__(self, folder: MirrorFolder, store: str) -> None:
        self._folder = folder
        self._store = store
        self._tags = folder.root / "tags"
        self._partial = folder.root / "partial"
        self._listings = folder.root / "listings" / _hash(store)
        for path in (self._tags, self._partial):
            path.mkdir(exist_ok=True)
        self._remove_old()

    def find(self, model: str, file: StoredFile, held: HeldContents) -> str | None:
        """The hash of the file's content, which is intact and kept; None if it is not stored."""
        try:
            digest = (self._tags / self._key(model, file)).read_text(encoding="ascii")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        if not _DIGEST.fullmatch(digest):
            return None
        held.add(digest)
        return digest if self._folder.has_content(digest, file.path) else None

    def open_partial(self, model: str, file: StoredFile) -> PartialFile | None:
        """The incomplete content of the file; None while another process downloads it."""
        key = self._key(model, file)
        path = self._partial / key
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                self._folder.make_room(file.size_bytes)
                return PartialFile(descriptor, path, file)
        except (BlockingIOError, FileNotFoundError):
            pass  # another process has it, or has just completed it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def complete(self, model: str, file: StoredFile, partial: PartialFile, held: HeldContents) -> str:
        """Stores the content of a complete `partial`; returns its hash."""
        digest = partial.digest()
        held.add(digest)
        self._folder.place(partial.path, digest)
        _write(self._tags / self._key(model, file), digest.encode())
        return digest

    def _key(self, model: str, file: StoredFile) -> str:
        return _hash(f"{self._store}\0{model}\0{file.path}\0{file.size_bytes}\0{file.tag}")

    def _remove_old(self) -> None:
        """Removes downloads that no process has continued for long, and tags whose contents are gone."""
        before_s = time.time() - _UNUSED_S
        for path in (*self._partial.iterdir(), *self._tags.iterdir()):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                is_used = path.parent == self._tags and self._folder.is_stored(path.read_text(encoding="ascii"))
                if not is_used and path.stat().st_mtime < before_s:
                    path.unlink()

    # Listings

    @property
    def was_listed(self) -> bool:
        """Whether the store was listed successfully with this cache before."""
        return self._listings.is_dir()

    def mark_listed(self) -> None:
        """Remembers that the store was listed."""
        self._listings.mkdir(parents=True, exist_ok=True)

    def save_listing(self, model: StoredModel) -> None:
        """Remembers the model as it was fetched."""
        self.mark_listed()
        _write(self._listings / _hash(model.name), msgspec.json.encode(model))

    def forget_listing(self, name: str) -> None:
        """Forgets a model that the store has no longer."""
        (self._listings / _hash(name)).unlink(missing_ok=True)

    def listings(self) -> dict[str, StoredModel]:
        """All models as they were last fetched, by name."""
        models: dict[str, StoredModel] = {}
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._listings.iterdir()):
                with contextlib.suppress(
                    msgspec.MsgspecError, OSError
                ):  # it was half written when its process was killed
                    model = msgspec.json.decode(path.read_bytes(), type=StoredModel)
                    models[model.name] = model
        return models


class PartialFile:
    """The content of a file as far as it is downloaded, under a lock of this process. A context manager; blocking."""

    def __init__(self, descriptor: int, path: Path, file: StoredFile) -> None:
        self.path = path
        self._file = file
        self._content = os.fdopen(descriptor, "r+b", buffering=0)
        self.size_bytes = os.fstat(descriptor).st_size
        if self.size_bytes > file.size_bytes:
            self.restart()
        self._hash_nothing()
        self._content.seek(0)
        while piece := self._content.read(_PIECE_BYTES):
            self._update(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._content.close()

    def write(self, piece: Any) -> None:
        """Appends the next piece."""
        view = memoryview(piece)
        while view:
            view = view[self._content.write(view) :]
        self._update(piece)
        self.size_bytes += len(piece)

    def restart(self) -> None:
        """Drops what was downloaded."""
        self._content.truncate(0)
        self._content.seek(0)
        self.size_bytes = 0
        self._hash_nothing()

    def _hash_nothing(self) -> None:
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False) if _MD5.fullmatch(self._file.tag) else None

    def _update(self, piece: Any) -> None:
        self._sha256.update(piece)
        if self._md5 is not None:
            self._md5.update(piece)

    def digest(self) -> str:
        """The SHA-256 of the content so far, in hexadecimal."""
        return self._sha256.hexdigest()

    @property
    def differs_from_tag(self) -> bool:
        """Whether the file's tag may be the MD5 of its content, which stores use as a tag, and the content has another."""
        tag = _MD5.fullmatch(self._file.tag)
        return self._md5 is not None and tag is not None and self._md5.hexdigest() != tag[1]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Replaces the file in one step."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    new.write_bytes(content)
    os.replace(new, path)
