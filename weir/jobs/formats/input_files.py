"""The input files of a job.

`InputFiles`: the files that paths name: files, folders and patterns, in one order, and none outside of the named folder.

`JoinedInput`: several files as one input: their items one after the other, always as many as were counted.

`FileFolder`: a folder of files, the bytes of each of which are one item.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol, overload

from weir.jobs.formats.items import MAX_ITEM_BYTES, DeclaredInput, JobInput, JobItem, KeptColumn
from weir.schemas.core.errors import WeirError, invalid, not_found
from weir.schemas.core.tensors import Tensor, pack_bytes

_MAGIC = frozenset("*?[")


class InputFile(NamedTuple):
    """One input file: its path, the folder below which it was found, and its name in the sources of items."""

    path: str
    root: str
    name: str


class InputFiles(Sequence[InputFile]):
    """The files of a job, in order. Their names share one buffer, because there may be millions."""

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
    def __getitem__(self, index: int) -> InputFile: ...

    @overload
    def __getitem__(self, index: slice) -> InputFiles: ...

    def __getitem__(self, index: int | slice) -> InputFile | InputFiles:
        if isinstance(index, slice):
            return self.only(self[place] for place in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(index)
        root = self._roots[bisect_right(self._firsts, index) - 1]
        name = os.fsdecode(bytes(self._names[self._ends[index] : self._ends[index + 1]]))
        shown = name if len(self._roots) == 1 else f"{os.path.basename(root)}/{name}"
        return InputFile(os.path.join(root, name), root, shown)

    @staticmethod
    def only(files: Iterable[InputFile]) -> InputFiles:
        """Add the files of another list."""
        chosen = InputFiles()
        for file in files:
            chosen.add(file.root, os.path.relpath(file.path, file.root))
        return chosen

    def fingerprint(self) -> str:
        """A digest of their names."""
        digest = hashlib.sha256("\0".join(self._roots).encode(errors="surrogateescape"))
        digest.update(self._ends)
        digest.update(self._names)
        return digest.hexdigest()


def find_input_files(paths: Sequence[str | os.PathLike[str]]) -> InputFiles:
    """The files that `paths` name: files, the files below folders, and those that match patterns; sorted, without
    duplicates.

    A folder's files are sorted by each part of their paths; names that begin with a dot are skipped. Links to folders are
    not followed. Raises WeirError: NOT_FOUND for a path that names nothing, INVALID_ARG without any file.
    """
    found = InputFiles()
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
        raise invalid("the job's input contains no files")
    return found


def is_folder_of(paths: Iterable[str | os.PathLike[str]]) -> bool:
    """Whether one of `paths` is a folder."""
    return any(os.path.isdir(path) for path in paths)


def open_regular(file: InputFile) -> int:
    """Open `file` for reading; returns the descriptor. Raises WeirError if it is gone, not a file, or outside of its
    folder.
    """
    try:
        # The file that is checked is the one that is opened, even if the path changes; a pipe or device is not opened
        # at all.
        place = os.open(file.path, os.O_PATH | os.O_CLOEXEC)
        try:
            real = os.readlink(f"/proc/self/fd/{place}")
            if not os.path.join(real, "").startswith(_within(file.root)):
                raise invalid(f"'{printable_name(file.name)}' is a link to a file outside of the job's input")
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise invalid(f"'{printable_name(file.name)}' is not a file")
            return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(place)
    except OSError as error:
        raise unreadable_file(file.name, error) from None


@lru_cache(maxsize=64)
def _within(root: str) -> str:
    """The prefix of the paths of all files below `root`."""
    return os.path.join(os.path.realpath(root), "")


def unreadable_file(name: str, error: OSError) -> WeirError:
    """The error for an input file that can't be read."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return not_found(f"'{printable_name(name)}' does not exist")
    return invalid(f"'{printable_name(name)}' can't be read: {error.strerror or type(error).__name__}")


def printable_name(name: str) -> str:
    """`name` as printable text: file names need not be UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def fingerprint_of(files: Iterable[InputFile]) -> str:
    """A digest of the names, sizes and modification times of `files`."""
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
    """(folder, name below it) of each file that `path` names."""
    if os.path.isdir(path):
        yield from ((path, name) for name in _walk(path))
    elif os.path.lexists(path):
        yield os.path.dirname(path) or ".", os.path.basename(path)
    elif _MAGIC.isdisjoint(path):
        raise not_found(f"'{printable_name(os.path.basename(path))}' does not exist")
    else:
        yield from _glob_matches(path)


def _glob_matches(pattern: str) -> Iterator[tuple[str, str]]:
    parts = Path(pattern).parts
    plain = next(index for index, part in enumerate(parts) if not _MAGIC.isdisjoint(part))
    root = os.path.join("", *parts[:plain]) or "."
    matches = sorted(glob.glob(os.path.join(*parts[plain:]), root_dir=root, recursive=True))
    files = [name for name in matches if not os.path.isdir(os.path.join(root, name))]
    if not files:
        raise not_found(f"no file matches '{printable_name(os.path.basename(pattern))}'")
    yield from ((root, name) for name in files)


def _walk(folder: str) -> Iterator[str]:
    """The files below `folder`, relative to it, sorted by each part; links to folders are reported as files."""
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
    """(path relative to `folder`, whether it is a folder) of the entries of `prefix`, which ends with a slash or is ""."""
    try:
        with os.scandir(os.path.join(folder, prefix)) as entries:
            return sorted(
                (prefix + entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        raise unreadable_file(prefix or os.path.basename(folder), error) from None


class ItemFile(Protocol):
    """One file of items."""

    def count(self) -> int:
        """The number of items. Raises WeirError if the file can't be read."""
        ...

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """The items from index `start` on, which has the number `first_number` in the job.

        A WeirError ends the iteration and becomes the error of all remaining items.
        """
        ...


class JoinedInput(JobInput):
    """The items of `files`, in order; each file has its reader in `readers`, and `close` ends what they share."""

    def __init__(
        self,
        files: Sequence[InputFile],
        readers: Sequence[ItemFile],
        close: Callable[[], None] = lambda: None,
        kept: Sequence[KeptColumn] = (),
    ) -> None:
        self.kept = kept
        self._files = files
        self._readers = readers
        self._close = close
        self._firsts: list[int] | None = None

    def close(self) -> None:
        """Implements `JobInput`."""
        self._close()

    def count(self) -> int:
        """Implements `JobInput`."""
        return self._counted()[-1]

    def items(self, start: int = 0) -> Iterator[JobItem]:
        """Implements `JobInput`."""
        firsts = self._counted()
        for index in range(max(bisect_right(firsts, start) - 1, 0), len(self._files)):
            first, end = firsts[index], firsts[index + 1]
            number = max(start, first)
            if number < end:
                yield from self._of_file(index, number - first, number, end)

    def fingerprint(self) -> str:
        """Implements `JobInput`."""
        return fingerprint_of(self._files)

    def _of_file(self, index: int, start: int, number: int, end: int) -> Iterator[JobItem]:
        """Items of one file. If it is shorter than when it was counted, the missing items are errors; added ones are
        ignored.
        """
        name = printable_name(self._files[index].name)
        error = invalid(f"'{name}' has changed since its items were counted")
        try:
            for item in self._readers[index].items(start, number):
                yield item
                number += 1
                if number == end:
                    return
        except WeirError as problem:
            error = problem
        for missing in range(number, end):
            yield JobItem(missing, name, error)

    def _counted(self) -> list[int]:
        if self._firsts is None:
            self._firsts = [0, *accumulate(reader.count() for reader in self._readers)]
        return self._firsts


class FileFolder(JobInput):
    """Files as items for a model with one input: one string, or UINT8 with dims [-1].

    Raises WeirError (INVALID_ARG) for any other model.
    """

    def __init__(self, files: InputFiles, inputs: dict[str, DeclaredInput]) -> None:
        self._files = files
        self._input = _only_input(inputs)

    def count(self) -> int:
        """Implements `JobInput`."""
        return len(self._files)

    def items(self, start: int = 0) -> Iterator[JobItem]:
        """Implements `JobInput`."""
        for number in range(start, len(self._files)):
            file = self._files[number]
            try:
                inputs: list[Tensor] | WeirError = [self._tensor(_content(file))]
            except WeirError as error:
                inputs = error
            yield JobItem(number, printable_name(file.name), inputs)

    def fingerprint(self) -> str:
        """Implements `JobInput`; of the files' names alone."""
        return self._files.fingerprint()

    def _tensor(self, content: bytes) -> Tensor:
        declared = self._input
        if declared.datatype == "BYTES":
            return Tensor(declared.name, "BYTES", declared.scalar, pack_bytes([content]))
        return Tensor(declared.name, "UINT8", declared.shape_of([len(content)]), content)


def _only_input(inputs: dict[str, DeclaredInput]) -> DeclaredInput:
    candidates = [declared for declared in inputs.values() if not declared.optional] or list(inputs.values())
    if len(candidates) == 1:
        declared = candidates[0]
        if declared.datatype == "BYTES" and set(declared.dims) <= {1, -1}:
            return declared
        if declared.datatype == "UINT8" and declared.dims == (-1,):
            return declared
    raise invalid(
        "a folder of files requires a model with one input, of TYPE_STRING for one element or TYPE_UINT8 of dims [-1]"
    )


def _content(file: InputFile) -> bytes:
    descriptor = open_regular(file)
    try:
        size = os.fstat(descriptor).st_size
        content = b""
        while size <= MAX_ITEM_BYTES:
            # One byte more than the size, so that a file that has grown meanwhile is noticed.
            more = os.read(descriptor, size + 1 - len(content))
            if not more:
                return content
            content = content + more if content else more
            size = max(size, len(content))
    except OSError as error:
        raise unreadable_file(file.name, error) from None
    finally:
        os.close(descriptor)
    raise invalid(f"'{printable_name(file.name)}' is larger than {MAX_ITEM_BYTES} bytes")
