"""Which files a job's paths name: files, folders and patterns, in one order, none of them outside of where it was found."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from schemas.errors import WeirError, invalid, not_found

_MAGIC = frozenset("*?[")


class FoundFile(NamedTuple):
    """One file of a job: where it is, below which folder it was looked for, and what it is called in sources."""

    path: str
    root: str
    name: str


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[FoundFile]:
    """The files that `paths` name: files themselves, those below folders, and what matches patterns; sorted, each once.

    A folder's files are sorted by each part of their paths; what begins with a dot is left out. Links to folders are not
    followed. Raises WeirError: NOT_FOUND for a path that names nothing, INVALID_ARG where there is no file at all.
    """
    found = [file for path in sorted(os.fspath(path) for path in paths) for file in _found_at(path)]
    if not found:
        raise invalid("the job's input holds no files")
    roots = {file.root for file in found}
    seen: set[str] = set()
    files: list[FoundFile] = []
    for path, root, name in found:
        if path not in seen:
            seen.add(path)
            name = name if len(roots) == 1 else f"{os.path.basename(root)}/{name}"
            files.append(FoundFile(path, root, name))
    return files


def is_folder_of(paths: Iterable[str | os.PathLike[str]]) -> bool:
    """Whether one of `paths` is a folder."""
    return any(os.path.isdir(path) for path in paths)


def open_regular(file: FoundFile) -> int:
    """A descriptor of `file`, to be read. Raises WeirError where it has gone, is none, or lies outside of its folder."""
    try:
        real, root = os.path.realpath(file.path), os.path.realpath(file.root)
        if os.path.commonpath([real, root]) != root:
            raise invalid(f"'{readable(file.name)}' is a link that leads out of the job's input")
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(file.name, error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise invalid(f"'{readable(file.name)}' is not a file")
    return descriptor


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


def _found_at(path: str) -> Iterator[FoundFile]:
    if os.path.isdir(path):
        yield from (FoundFile(os.path.join(path, name), path, name) for name in walk(path))
    elif os.path.lexists(path):
        yield FoundFile(path, os.path.dirname(path) or ".", os.path.basename(path))
    elif _MAGIC.isdisjoint(path):
        raise not_found(f"'{readable(path)}' is not there")
    else:
        yield from _matches(path)


def _matches(pattern: str) -> Iterator[FoundFile]:
    parts = Path(pattern).parts
    plain = next(index for index, part in enumerate(parts) if not _MAGIC.isdisjoint(part))
    root = os.path.join("", *parts[:plain]) or "."
    matches = sorted(glob.glob(os.path.join(*parts[plain:]), root_dir=root, recursive=True))
    files = [name for name in matches if not os.path.isdir(os.path.join(root, name))]
    if not files:
        raise not_found(f"nothing matches '{readable(pattern)}'")
    yield from (FoundFile(os.path.join(root, name), root, name) for name in files)


def walk(folder: str, prefix: str = "") -> Iterator[str]:
    """The files below `folder`, relative to it, sorted by each part; links to folders are told as files."""
    try:
        with os.scandir(os.path.join(folder, prefix)) as entries:
            names = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        raise unreadable(prefix or os.path.basename(folder), error) from None
    for name, is_folder in names:
        if name.startswith("."):
            continue
        path = f"{prefix}{name}"
        if is_folder:
            yield from walk(folder, f"{path}/")
        else:
            yield path
