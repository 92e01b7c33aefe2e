"""`MirrorFolder`: a folder of models that were pushed, made of files that lie under the hashes of their contents.

A model's folder is made whole beside the one that is there, of hard links, and takes its place in one step. Nothing is ever
written outside: names and paths are checked, and the only symbolic links are the folder's own. Files have a time of
modification that follows from their content, so that all workers see the same change at the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from repository.paths import check_model_name
from schemas.errors import unavailable
from schemas.pushed_model import PushedFile, PushedModel, is_inside
from worker.locked_folder import LockedFolder, remove_left_folders

logger = logging.getLogger("weir.worker")

PREFIX = "weir-mirror-"
"""What the names of these folders begin with."""

_UNUSED_S = 7 * 86_400.0
_FORMER_S = 600.0
_YEAR_2001_NS = 10**18


class MirrorFolder:
    """See the module. `models` is a model repository. All of it is blocking, and raises OSError.

    Contents lie in `cache`, where they are kept and where several workers may have them, or else go with this process.
    """

    def __init__(self, cache: Path | None = None) -> None:
        if cache is not None:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_left_folders(PREFIX, cache)
        self._folder = LockedFolder(PREFIX, cache)
        self._contents = (cache or self._folder.path) / "contents"
        self._trees = self._folder.path / "trees"
        self.models = self._folder.path / "models"
        self._checked: set[str] = set()
        self._former: dict[str, tuple[Path, float]] = {}
        self._expected: Counter[str] = Counter()
        for folder in (self._contents, self._trees, self.models):
            folder.mkdir(exist_ok=True)
        if cache is not None:
            self._forget_unused(time.time() - _UNUSED_S)

    @contextlib.contextmanager
    def expecting(self, model: PushedModel) -> Iterator[None]:
        """While the context lasts, contents of the model stay, whatever becomes of other models."""
        digests = {file.digest for file in model.files}
        self._expected.update(digests)
        try:
            yield
        finally:
            self._expected.subtract(digests)
            for digest in digests:
                if not self._expected[digest]:
                    del self._expected[digest]

    def has(self, file: PushedFile) -> bool:
        """Whether the content of the file is here, and is what it should be: one that somebody has changed is removed."""
        path = self._contents / file.digest
        if file.digest in self._checked and path.exists():
            return True
        try:
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() == file.digest:
                    self._checked.add(file.digest)
                    return True
        except FileNotFoundError:
            return False
        logger.warning("file '%s' is not what it was in the cache of models: it is fetched again", file.path)
        path.unlink(missing_ok=True)
        return False

    def receive(self, file: PushedFile) -> IncomingFile:
        """What takes the content of the file, piece by piece."""
        return IncomingFile(
            self._contents / f".{file.digest}.{secrets.token_hex(4)}", self._contents / file.digest, file
        )

    def install(self, model: PushedModel) -> None:
        """Puts the model in the place of what was there of it. Raises WeirError for a name or path that leads out."""
        check_model_name(model.name)
        for file in model.files:
            if not is_inside(file.path):
                raise unavailable(f"model '{model.name}' has a file that leads out of its folder")
        tree = self._trees / secrets.token_hex(8)  # not by its name, which may be as long as a file's may be
        tree.mkdir()
        try:
            for file in model.files:
                place = tree / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                _link(self._contents / file.digest, place)
            link = self._trees / f"{tree.name}.link"
            link.symlink_to(tree)
            former = self._tree_of(model.name)
            os.replace(link, self.models / model.name)
        except OSError:
            shutil.rmtree(tree, ignore_errors=True)
            raise
        self._let_go(model.name, former)

    def remove(self, name: str) -> None:
        """Takes the model away."""
        check_model_name(name)
        former = self._tree_of(name)
        (self.models / name).unlink(missing_ok=True)
        self._let_go(name, former)

    def close(self) -> None:
        """Removes the models; contents in a cache stay."""
        self._folder.remove()

    def _tree_of(self, name: str) -> Path | None:
        with contextlib.suppress(OSError):
            return Path(os.readlink(self.models / name))
        return None

    def _let_go(self, name: str, former: Path | None) -> None:
        # Somebody may be reading what has just been replaced: it goes with the next change, or with another's much later.
        long_ago_s = time.monotonic() - _FORMER_S
        for other, (tree, moment_s) in list(self._former.items()):
            if other == name or moment_s < long_ago_s:
                shutil.rmtree(tree, ignore_errors=True)
                self._former.pop(other, None)
        if former is not None:
            self._former[name] = former, time.monotonic()
        if self._contents.parent == self._folder.path:
            self._forget_unused(time.time() + 1)

    def _forget_unused(self, before_s: float) -> None:
        """Removes contents that have been in no model for long, and are not to be."""
        for path in self._contents.iterdir():
            if path.name in self._expected:
                continue
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_nlink == 1 and status.st_ctime < before_s and not path.name.startswith("."):
                    path.unlink()


class IncomingFile:
    """Takes the content of a file; it is there under its hash once it is whole, and not before."""

    def __init__(self, partial: Path, place: Path, file: PushedFile) -> None:
        self._partial = partial
        self._place = place
        self._expected = file
        self._digest = hashlib.sha256()
        self._content = partial.open("xb")

    def write(self, piece: bytes) -> None:
        """Takes the next piece."""
        self._digest.update(piece)
        self._content.write(piece)

    def finish(self) -> None:
        """All pieces have come. Raises UNAVAILABLE where they are not the file that was pushed."""
        self._content.close()
        if self._digest.hexdigest() != self._expected.digest:
            self.abandon()
            raise unavailable(f"the content of file '{self._expected.path}' is not what was pushed")
        os.chmod(self._partial, 0o444)
        moment_ns = _YEAR_2001_NS + int(self._expected.digest, 16) % (1 << 58)
        os.utime(self._partial, ns=(moment_ns, moment_ns))
        os.replace(self._partial, self._place)

    def abandon(self) -> None:
        """No more will come. May be called after `finish`."""
        self._content.close()
        self._partial.unlink(missing_ok=True)


def _link(content: Path, place: Path) -> None:
    try:
        os.link(content, place)
    except OSError:  # a file system without links
        shutil.copy2(content, place)
