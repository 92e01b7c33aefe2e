"""Which files a job's paths name: files, folders and patterns, in one order, none of them outside of where it was found."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, overload

from schemas.errors import WeirError, invalid, not_found

_MAGIC = frozenset("*?[")


class FoundFile(NamedTuple):
    """One file of a job: where it is, below which folder it was looked for, and what it is called in sources."""

    path: str
    root: str
    name: str


class FoundFiles(Sequence[FoundFile]):
    """The files of a job, in order: their names in one buffer, for there may be millions."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._ends = array("Q", [0])
        self._roots: list[str] = []
        self._firsts: list[int] = []

    def add(self, root: str, name: str) -> None:
        """Add the file `name` below `root`."""
        if not self._roots or self._roots[-1] != root:
            self._roots.append(root)
            self._firsts.append(len(self))
        self._names += os.fsencode(name)
        self._ends.append(len(self._names))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> FoundFile: ...

    @overload
    def __getitem__(self, index: slice) -> FoundFiles: ...

    def __getitem__(self, index: int | slice) -> FoundFile | FoundFiles:
        if isinstance(index, slice):
            return self.only(self[place] for place in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(index)
        root = self._roots[bisect_right(self._firsts, index) - 1]
        name = os.fsdecode(bytes(self._names[self._ends[index] : self._ends[index + 1]]))
        shown = name if len(self._roots) == 1 else f"{os.path.basename(root)}/{name}"
        return FoundFile(os.path.join(root, name), root, shown)

    @staticmethod
    def only(files: Iterable[FoundFile]) -> FoundFiles:
        """Those of `files`, which are of a list of this kind."""
        chosen = FoundFiles()
        for file in files:
            chosen.add(file.root, os.path.relpath(file.path, file.root))
        return chosen

    def fingerprint(self) -> str:
        """A digest of their names."""
        digest = hashlib.sha256("\0".join(self._roots).encode(errors="surrogateescape"))
        digest.update(self._ends)
        digest.update(self._names)
        return digest.hexdigest()


def find_files(paths: Sequence[str | os.PathLike[str]]) -> FoundFiles:
    """The files that `paths` name: files themselves, those below folders, and what matches patterns; sorted, each once.

    A folder's files are sorted by each part of their paths; what begins with a dot is left out. Links to folders are not
    followed. Raises WeirError: NOT_FOUND for a path that names nothing, INVALID_ARG where there is no file at all.
    """
    found = FoundFiles()
    seen: set[str] | None = set() if len(paths) > 1 else None
    for path in sorted(os.fspath(path) for path in paths):
        for root, name in _found_at(path):
            if seen is not None:
                whole = os.path.join(root, name)
                if whole in seen:
                    continue
                seen.add(whole)
            found.add(root, name)
    if not found:
        raise invalid("the job's input holds no files")
    return found


def is_folder_of(paths: Iterable[str | os.PathLike[str]]) -> bool:
    """Whether one of `paths` is a folder."""
    return any(os.path.isdir(path) for path in paths)


def open_regular(file: FoundFile) -> int:
    """A descriptor of `file`, to be read. Raises WeirError where it has gone, is none, or lies outside of its folder."""
    try:
        # What is looked at is what is opened then, whatever becomes of the path; a pipe or a device is not opened at all.
        place = os.open(file.path, os.O_PATH | os.O_CLOEXEC)
        try:
            real = os.readlink(f"/proc/self/fd/{place}")
            if not os.path.join(real, "").startswith(_within(file.root)):
                raise invalid(f"'{readable(file.name)}' is a link that leads out of the job's input")
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise invalid(f"'{readable(file.name)}' is not a file")
            return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(place)
    except OSError as error:
        raise unreadable(file.name, error) from None


@lru_cache(maxsize=64)
def _within(root: str) -> str:
    """How the paths of all files below `root` begin."""
    return os.path.join(os.path.realpath(root), "")


def unreadable(name: str, error: OSError) -> WeirError:
    """The error for a file of the input that can't be read."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return not_found(f"'{readable(name)}' is not there")
    return invalid(f"'{readable(name)}' can't be read: {error.strerror or type(error).__name__}")


def readable(name: str) -> str:
    """`name` as text that can be written: file names need not be UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def fingerprint_of(files: Iterable[FoundFile]) -> str:
    """A digest of the names, sizes and times of change of `files`."""
    digest = hashlib.sha256()
    for file in files:
        try:
            status = os.stat(file.path)
            facts = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            facts = "gone"
        digest.update(os.fsencode(file.name) + f"\0{facts}\n".encode())
    return digest.hexdigest()


def _found_at(path: str) -> Iterator[tuple[str, str]]:
    """(where it was looked for, the name there) of each file that `path` names."""
    if os.path.isdir(path):
        yield from ((path, name) for name in _walk(path))
    elif os.path.lexists(path):
        yield os.path.dirname(path) or ".", os.path.basename(path)
    elif _MAGIC.isdisjoint(path):
        raise not_found(f"'{readable(os.path.basename(path))}' is not there")
    else:
        yield from _matches(path)


def _matches(pattern: str) -> Iterator[tuple[str, str]]:
    parts = Path(pattern).parts
    plain = next(index for index, part in enumerate(parts) if not _MAGIC.isdisjoint(part))
    root = os.path.join("", *parts[:plain]) or "."
    matches = sorted(glob.glob(os.path.join(*parts[plain:]), root_dir=root, recursive=True))
    files = [name for name in matches if not os.path.isdir(os.path.join(root, name))]
    if not files:
        raise not_found(f"nothing matches '{readable(os.path.basename(pattern))}'")
    yield from ((root, name) for name in files)


def _walk(folder: str) -> Iterator[str]:
    """The files below `folder`, relative to it, sorted by each part; links to folders are told as files."""
    open_folders = [iter(_entries(folder, ""))]
    while open_folders:
        for path, is_folder in open_folders[-1]:
            if is_folder:
                open_folders.append(iter(_entries(folder, f"{path}/")))
                break
            yield path
        else:
            open_folders.pop()


def _entries(folder: str, prefix: str) -> list[tuple[str, bool]]:
    """(path relative to `folder`, whether it is a folder) of what lies in `prefix`, which ends with a slash or is ""."""
    try:
        with os.scandir(os.path.join(folder, prefix)) as entries:
            return sorted(
                (prefix + entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        raise unreadable(prefix or os.path.basename(folder), error) from None
