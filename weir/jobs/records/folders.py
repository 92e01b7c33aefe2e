"""The folders of offline jobs.

`BatchRoots`: the folders below which jobs may read and write. Paths come from clients. They are resolved, including links,
before they are checked, and checked again before a job runs.

`Uploads`: items that clients sent with their jobs, and the outputs of these jobs, in a folder below a batch root. They are
removed with their job. Uploads without a job, left by a process that died, are removed after a day.

`OutputFolder`: protects the output folder of a job: files of others are not overwritten, and one process at a time writes.
File `.weir-job` in the folder names the job. The writing process holds a lock on it (flock), which the kernel releases when
the process ends: a runner that has lost its lease without noticing keeps others out.
"""

from __future__ import annotations

import fcntl
import fnmatch
import itertools
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import orjson
from msgspec.structs import replace

from weir.jobs.records.record import MAX_INPUTS, JobSpec
from weir.schemas.core.errors import WeirError, invalid, unavailable

OPTION = "--batch-root"

MAX_EXAMINED = 100_000
"""The most files and folders that are examined for a pattern. Clients choose patterns, and make folders by the outputs of
their jobs."""

MAX_EXPANSION_S = 5.0
"""The longest that a pattern is expanded, in seconds."""

ANY_DEPTH = "**"

_PATTERN = frozenset("*?[")


class BatchRoots:
    """Checks paths against the batch roots. All methods block on the file system."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root).resolve() for root in roots]

    @property
    def first(self) -> Path | None:
        """The folder for uploads, None without a root."""
        return self._roots[0] if self._roots else None

    def check_any(self) -> None:
        """Raises WeirError (INVALID_ARG) if the server has no batch root."""
        if not self._roots:
            raise invalid(f"offline jobs are disabled on this server: start it with {OPTION} FOLDER")

    def checked(self, spec: JobSpec) -> JobSpec:
        """The spec with patterns expanded, sorted by name. Raises WeirError (INVALID_ARG) for forbidden paths."""
        self.check_any()
        inputs: list[str] = []
        for text in spec.inputs:
            if _PATTERN & set(text) and not Path(text).exists():
                found = self._matches(text)
                if not found:
                    raise invalid(f"no input matches '{text}'")
                inputs += found
            else:
                inputs.append(text)
            if len(inputs) > MAX_INPUTS:
                raise invalid(f"a job takes at most {MAX_INPUTS} input files: name their folder instead of a pattern")
        self.inputs(inputs)
        self.output(spec.output)
        return replace(spec, inputs=tuple(inputs))

    def inputs(self, texts: Iterable[str]) -> list[Path]:
        """The resolved input paths. Raises WeirError (INVALID_ARG)."""
        paths = []
        for text in texts:
            path = self._inside("input", text)
            if not path.exists():
                raise invalid(f"input '{text}' does not exist")
            paths.append(path)
        return paths

    def output(self, text: str) -> Path:
        """The resolved output folder, which need not exist. Raises WeirError (INVALID_ARG)."""
        path = self._inside("output", text)
        if path in self._roots:
            raise invalid(f"output '{text}' is a {OPTION} itself: name a folder below it")
        if path.exists() and not path.is_dir():
            raise invalid(f"output '{text}' is not a folder")
        return path

    def holds(self, spec: JobSpec) -> bool:
        """Whether the paths of a job are below these roots."""
        places = [*spec.inputs[:1], spec.output]
        return all(any(Path(place).is_relative_to(root) for root in self._roots) for place in map(_real, places))

    def _matches(self, pattern: str) -> list[str]:
        """The paths that match a pattern. Folders outside of the roots are not even listed."""
        parts = Path(pattern).parts
        fixed = next(place for place, part in enumerate(parts) if _PATTERN & set(part))
        self._inside("input", str(Path(*parts[:fixed])))
        if ".." in parts[fixed:]:
            raise invalid(f"input '{pattern}' must not contain '..' after a pattern")
        if parts.count(ANY_DEPTH) > 1:
            raise invalid(f"input '{pattern}' must not contain '{ANY_DEPTH}' more than once")
        return sorted(map(str, _Expansion(pattern, Path(*parts[:fixed]), parts[fixed:]).paths()))

    def _inside(self, what: str, text: str) -> Path:
        if not Path(text).is_absolute() or "\0" in text:
            raise invalid(f"{what} '{text}' is not an absolute path")
        try:
            path = Path(text).resolve()
        except (OSError, RuntimeError) as error:  # links in a circle
            raise invalid(f"{what} '{text}' can't be resolved") from error
        if not any(path.is_relative_to(root) for root in self._roots):
            raise invalid(f"{what} '{text}' is not below a folder that the server was started with as {OPTION}")
        return path


class _Expansion:
    """The paths that match a pattern, as a shell matches it: hidden files match no `*`, and `**` does not follow links.

    Raises WeirError (INVALID_ARG) for a pattern that takes too long.
    """

    def __init__(self, pattern: str, base: Path, parts: Sequence[str]) -> None:
        self._pattern = pattern
        self._parts = parts
        self._pending = [(base, 0)]  # a path, and which part what is below it must match
        self._examined = 0
        self._deadline_s = time.monotonic() + MAX_EXPANSION_S

    def paths(self) -> Iterator[Path]:
        """The paths below the base that match the parts, each once, in no order."""
        while self._pending:
            path, at = self._pending.pop()
            if at == len(self._parts):
                yield path
            elif self._parts[at] == ANY_DEPTH:
                self._pending.append((path, at + 1))
                yield from self._at_any_depth(path, at)
            elif _PATTERN & set(self._parts[at]):
                names = [entry.name for entry in self._visible(path, self._parts[at])]
                self._pending += ((path / n, at + 1) for n in names if fnmatch.fnmatchcase(n, self._parts[at]))
            elif os.path.lexists(path / self._parts[at]):
                self._pending.append((path / self._parts[at], at + 1))

    def _at_any_depth(self, path: Path, at: int) -> Iterator[Path]:
        for entry in self._visible(path, ANY_DEPTH):
            if entry.is_dir(follow_symlinks=False):
                self._pending.append((path / entry.name, at))
            elif at + 1 == len(self._parts):
                yield path / entry.name

    def _visible(self, path: Path, part: str) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(path) as listed:
                entries = list(itertools.islice(listed, MAX_EXAMINED - self._examined + 1))
        except OSError:  # no folder, or one that may not be read
            return
        self._examined += len(entries)
        if self._examined > MAX_EXAMINED or time.monotonic() > self._deadline_s:
            raise invalid(
                f"input '{self._pattern}' takes too long to expand: {self._examined} files and folders were examined, "
                f"of at most {MAX_EXAMINED} in {MAX_EXPANSION_S:.0f} s; name the files, or their folder"
            )
        yield from (entry for entry in entries if part.startswith(".") or not entry.name.startswith("."))


def _real(text: str) -> Path:
    try:
        return Path(text).resolve()
    except (OSError, RuntimeError):
        return Path(text)


FOLDER = "weir-uploads"
_INPUT, _OUTPUT = "input.jsonl", "output"
_ORPHANS_AGE_S = 86400.0
_PIECE_BYTES = 256 << 10


class Uploads:
    """The uploads below a root. All methods block on the file system, and raise OSError."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def store(self, id: str, body: bytes) -> tuple[str, str]:
        """Stores the items of job `id`; returns the paths of the input and of the output folder."""
        folder = self._folder / id
        folder.mkdir(parents=True)
        with (folder / _INPUT).open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        return str(folder / _INPUT), str(folder / _OUTPUT)

    def remove(self, id: str) -> None:
        """Removes the files of job `id`, if any."""
        shutil.rmtree(self._folder / id, ignore_errors=True)

    def sweep(self, known: Collection[str]) -> None:
        """Removes old files that belong to none of the `known` jobs."""
        try:
            entries = list(os.scandir(self._folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name not in known and entry.stat(follow_symlinks=False).st_mtime < time.time() - _ORPHANS_AGE_S:
                self.remove(entry.name)


def json_lines(output: Path) -> Iterator[bytes]:
    """The content of the JSON Lines shards in an output folder, in order, in pieces."""
    for shard in sorted(output.glob("part-*.jsonl")):
        with shard.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece


MARKER = ".weir-job"
_MAX_MARKER_BYTES = 64 << 10


class OutputFolder:
    """The output folder of job `job_id`. All methods block on the file system, and raise OSError."""

    def __init__(self, path: Path, job_id: str) -> None:
        self.path = path
        self._job_id = job_id
        self._fd = -1

    def check(self) -> None:
        """Raises WeirError (INVALID_ARG) unless the folder is missing, empty, or belongs to the job."""
        try:
            names = {entry.name for entry in os.scandir(self.path)}
        except FileNotFoundError:
            return
        if not names:
            return
        owner = self._read_mark().get("id") if MARKER in names else None
        if owner is None and names == {MARKER}:
            return  # the process that created the marker died before it wrote it
        if owner != self._job_id:
            what = f"belongs to job {owner}" if isinstance(owner, str) else "is not empty"
            raise invalid(f"the output folder '{self.path}' {what}: files are not overwritten; use another folder")

    def claim(self, fingerprint: str) -> None:
        """Creates, marks and locks the folder; call `release` afterwards.

        Raises WeirError: UNAVAILABLE while another process writes there; INVALID_ARG if the folder belongs to another job,
        or if the input's `fingerprint` has changed since the job started.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.check()
        fd = os.open(self.path / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
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
        """Releases the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _compare(self, fd: int, fingerprint: str) -> None:
        data = os.pread(fd, _MAX_MARKER_BYTES, 0)
        if data:
            mark = _parsed(data)
            if mark.get("id") != self._job_id:
                raise invalid(f"the output folder '{self.path}' belongs to another job")
            if mark.get("input") != fingerprint:
                raise invalid("the input has changed since the job started: submit a new job")
            return
        os.pwrite(fd, orjson.dumps({"id": self._job_id, "input": fingerprint}), 0)
        os.fsync(fd)

    def _read_mark(self) -> dict[str, object]:
        try:
            return _parsed((self.path / MARKER).read_bytes())
        except (OSError, WeirError):
            return {}


def _parsed(data: bytes) -> dict[str, object]:
    try:
        mark = orjson.loads(data)
    except ValueError as error:
        raise invalid(f"file {MARKER} of the output folder can't be read") from error
    return mark if isinstance(mark, dict) else {}
