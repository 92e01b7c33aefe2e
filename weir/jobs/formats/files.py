"""Opens the files of a job: `open_input` returns the items of its input, `JobOutput` writes the shards of its output.

A shard is written under a hidden name, synced, and renamed to a name that states its items. So the names alone show how
far the job has come, even after a crash. A folder has one writer: a process that has lost its job, and still runs,
finds that the next shard exists, and gets an error.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from enum import StrEnum
from typing import Any, BinaryIO

import orjson

from weir.jobs.formats.input_files import (
    FileFolder,
    InputFile,
    InputFiles,
    ItemFile,
    JoinedInput,
    find_input_files,
    is_folder_of,
    printable_name,
)
from weir.jobs.formats.items import MAX_ITEM_BYTES, ItemResult, JobInput, JobItem, KeptColumn, declared_inputs
from weir.jobs.formats.jsonl import JsonLinesFile, JsonShards
from weir.jobs.formats.npy import NumpyFile, NumpyShards
from weir.jobs.formats.parquet import ParquetShards
from weir.jobs.formats.parquet_reader import ParquetFile, ParquetReader, RowSource
from weir.jobs.formats.shards import LARGE_SHARD_BYTES, ShardFormat
from weir.runtime.process_memory import return_free_memory
from weir.schemas.config.model_config import ModelConfig, ModelOutput
from weir.schemas.core.errors import WeirError, internal, invalid, unavailable

SUMMARY = "summary.json"
LOCK = ".lock"
LOCK_TIMEOUT_S = 10.0
"""Timeout of the lock of the folder, which another writer holds only while it renames a shard."""

_SHARD = re.compile(r"part-(\d{10})-(\d{10})(\.[a-z]+)")
_UNFINISHED = re.compile(r"\.(?:part-\d{10}-\d{10}\.[a-z]+|summary\.json)\.\d+\.tmp")


class OutputFormat(StrEnum):
    """The formats of shards."""

    JSONL = "jsonl"
    NPZ = "npz"
    PARQUET = "parquet"


class JobOutput:
    """The results of one job in `folder`, which is created if necessary. Methods block: call them in threads.

    All methods raise WeirError: UNAVAILABLE if the folder can't be written now (usually a full disk); INVALID_ARG if it
    contains something other than this job's shards.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        format: OutputFormat | str,
        model_outputs: Sequence[ModelOutput],
        kept: Sequence[KeptColumn] = (),
    ) -> None:
        self._folder = os.fspath(folder)
        self._format = _shard_format(format, model_outputs, kept)
        with _write_errors():
            os.makedirs(self._folder, exist_ok=True)
            with self._locked():
                for name in os.listdir(self._folder):
                    if _UNFINISHED.fullmatch(name):
                        os.unlink(os.path.join(self._folder, name))

    def covered(self) -> int:
        """The number of the first item that is in no shard."""
        with _write_errors():
            shards = self._shards()
        return shards[-1][1] + 1 if shards else 0

    def write(self, first: int, results: Sequence[ItemResult]) -> int:
        """Write a shard of `results`, consecutive items from number `first` on; return how many of them failed.

        When it returns, the shard is on disk; if it raises, nothing of it is, and it can be written again.
        An item whose outputs the format can't represent becomes a failure.
        """
        if not results or any(result.number != first + place for place, result in enumerate(results)):
            raise internal(f"the results from item {first} on are not in order")

        def fill(file: BinaryIO) -> int:
            return self._format.write(file, results)

        def check() -> None:
            shards = self._shards()
            covered = shards[-1][1] + 1 if shards else 0
            if covered != first:
                raise invalid(f"the output is written up to item {covered}, not {first}: another process writes it too")

        failed = self._store(_shard_name(first, first + len(results) - 1, self._format.suffix), fill, check)
        if sum(tensor.size_bytes for result in results for tensor in result.outputs or ()) > LARGE_SHARD_BYTES:
            return_free_memory()  # each thread would keep the copies that were made of large items
        return failed

    def failures(self) -> Iterator[tuple[int, list[int]]]:
        """The first item and the numbers of the failed items of each shard that has failures, in order."""
        with _write_errors():
            shards = self._shards()
        for first, last in shards:
            with self._reading(first, last) as file:
                failed = self._format.failed(file)
            if failed:
                yield first, failed

    def rewrite(self, first: int, results: Sequence[ItemResult]) -> int:
        """Replace results in the shard that starts at `first` by `results` of the same items.

        Returns how many failures are left in the shard.
        """
        with _write_errors(), self._locked():
            last = next((end for begin, end in self._shards() if begin == first), None)
            if last is None or any(not first <= result.number <= last for result in results):
                raise internal(f"no shard begins at item {first} and contains these items")
            with self._reading(first, last) as old:

                def fill(file: BinaryIO) -> int:
                    return self._format.replace(old, file, sorted(results, key=lambda result: result.number))

                return self._write_file(_shard_name(first, last, self._format.suffix), fill, None)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary` beside the shards when the job is complete."""
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        self._store(SUMMARY, lambda file: file.write(text), None)
        with _ignoring_missing():
            os.unlink(os.path.join(self._folder, LOCK))

    def _shards(self) -> list[tuple[int, int]]:
        """(first, last) of the shards, in order. Raises WeirError if items are missing or occur twice."""
        found: list[tuple[int, int]] = []
        for name in os.listdir(self._folder):
            match = _SHARD.fullmatch(name)
            if match is None:
                continue
            if match[3] != self._format.suffix:
                raise invalid(f"the output folder holds results of another format: '{name}'")
            found.append((int(match[1]), int(match[2])))
        found.sort()
        expected = 0
        for first, last in found:
            if first != expected or last < first:
                raise invalid(
                    f"the output folder lacks items from {expected} on, or has some twice: the next shard begins at {first}"
                )
            expected = last + 1
        return found

    def _store(self, name: str, fill: Callable[[BinaryIO], int], check: Callable[[], None] | None) -> int:
        with _write_errors():
            return self._write_file(name, fill, check)

    def _write_file(self, name: str, fill: Callable[[BinaryIO], int], check: Callable[[], None] | None) -> int:
        final = os.path.join(self._folder, name)
        unfinished = os.path.join(self._folder, f".{name}.{os.getpid()}.tmp")
        try:
            with open(unfinished, "wb") as file:
                result = fill(file)
                file.flush()
                os.fsync(file.fileno())
            if check is None:
                os.replace(unfinished, final)
            else:
                with self._locked():
                    check()
                    os.replace(unfinished, final)
            self._sync_folder()
            return result
        except BaseException:
            with _ignoring_missing():
                os.unlink(unfinished)
            raise

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock without which no writer may rename a shard."""
        with open(os.path.join(self._folder, LOCK), "wb") as file:
            give_up = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise unavailable("another process holds the lock of the job's output") from None
                    time.sleep(0.01)
            yield

    @contextmanager
    def _reading(self, first: int, last: int) -> Iterator[BinaryIO]:
        name = _shard_name(first, last, self._format.suffix)
        try:
            with open(os.path.join(self._folder, name), "rb") as file:
                yield file
        except ValueError as error:
            raise invalid(f"'{name}' is not a shard of a job: {error}") from None


def _shard_format(
    format: OutputFormat | str, outputs: Sequence[ModelOutput], kept: Sequence[KeptColumn]
) -> ShardFormat:
    if format == OutputFormat.JSONL:
        return JsonShards(outputs)
    if format == OutputFormat.NPZ:
        if kept:
            raise invalid(f"column '{kept[0].name}' can't be written to .npz: write JSON Lines or Parquet")
        return NumpyShards(outputs)
    if format == OutputFormat.PARQUET:
        return ParquetShards(outputs, kept)
    raise invalid(f"unknown output format '{format}': expected one of {', '.join(OutputFormat)}")


def _shard_name(first: int, last: int, suffix: str) -> str:
    return f"part-{first:010}-{last:010}{suffix}"


@contextmanager
def _ignoring_missing() -> Iterator[None]:
    try:
        yield
    except OSError:
        pass


@contextmanager
def _write_errors() -> Iterator[None]:
    """Turn file errors into UNAVAILABLE: the job pauses and loses nothing."""
    try:
        yield
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(error: OSError) -> WeirError:
    return unavailable(f"the job's output can't be written: {error.strerror or type(error).__name__}")


__all__ = [
    "MAX_ITEM_BYTES",
    "InputFormat",
    "ItemResult",
    "JobInput",
    "JobItem",
    "JobOutput",
    "OutputFormat",
    "default_output_format",
    "open_input",
]


class InputFormat(StrEnum):
    """The formats of input files."""

    JSONL = "jsonl"
    NPY = "npy"
    """NumPy arrays, `.npy` and `.npz`."""
    PARQUET = "parquet"
    FILES = "files"
    """Each file is one item, whatever its content is."""


_BY_SUFFIX = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".npy": InputFormat.NPY,
    ".npz": InputFormat.NPY,
    ".parquet": InputFormat.PARQUET,
}

_OUTPUT_FORMATS = {InputFormat.NPY: OutputFormat.NPZ, InputFormat.PARQUET: OutputFormat.PARQUET}


def open_input(
    paths: Sequence[str | os.PathLike[str]],
    format: InputFormat | str | None,
    config: ModelConfig,
    parquet: RowSource | None = None,
    columns: Sequence[str] = (),
) -> JobInput:
    """Open the items in the files that `paths` (files, folders, patterns) name, for the model of `config`.

    Several files form one input, in sorted order. Format None is derived from the suffix, which must be the same for all
    files; a folder with other files is a folder of files. Parquet files are read by `parquet`, by default in a process of
    the input's own, which ends when the input is closed. Of their columns, `columns` are read, by default all; those that
    are no input are repeated in the results. Raises WeirError.
    """
    files = find_input_files(paths)
    in_folder = is_folder_of(paths)
    chosen = _guessed(files, in_folder) if format is None else input_format(format)
    inputs = declared_inputs(config)
    if columns and chosen is not InputFormat.PARQUET:
        raise invalid(f"columns are chosen in Parquet files, and the job's input has format '{chosen}'")
    if chosen is InputFormat.FILES:
        return FileFolder(files, inputs)
    if in_folder:
        files = InputFiles.only(file for file in files if _BY_SUFFIX.get(_suffix(file)) is chosen)
        if not files:
            raise invalid(f"the job's input contains no files of format '{chosen}'")
    with ExitStack() as opened:
        if chosen is InputFormat.PARQUET:
            source = parquet or opened.enter_context(closing(ParquetReader()))
            parts = [ParquetFile(file, inputs, source, columns) for file in files]
            different = next((part for part in parts if part.kept != parts[0].kept), None)
            if different is not None:
                raise invalid(different.differs_from(parts[0]))
            return JoinedInput(files, parts, opened.pop_all().close, parts[0].kept)
        readers: list[ItemFile]
        if chosen is InputFormat.JSONL:
            readers = [JsonLinesFile(file, config.name, inputs) for file in files]
        else:
            readers = [NumpyFile(file, inputs) for file in files]
        return JoinedInput(files, readers)


def input_format(name: str) -> InputFormat:
    """The format called `name`. Raises WeirError if it is unknown."""
    try:
        return InputFormat(name)
    except ValueError:
        raise invalid(f"unknown input format '{name}': expected one of {', '.join(InputFormat)}") from None


def default_output_format(paths: Sequence[str | os.PathLike[str]], format: InputFormat | str | None) -> OutputFormat:
    """The default format of the output: that of the input, JSON Lines for a folder of files."""
    chosen = _guessed(find_input_files(paths), is_folder_of(paths)) if format is None else input_format(format)
    return _OUTPUT_FORMATS.get(chosen, OutputFormat.JSONL)


def _guessed(files: InputFiles, in_folder: bool) -> InputFormat:
    found = _BY_SUFFIX.get(_suffix(files[0]))
    other = next((file for file in files if _BY_SUFFIX.get(_suffix(file)) is not found or found is None), None)
    if found is not None and other is None:
        return found
    if in_folder:
        return InputFormat.FILES
    shown = printable_name((other or files[0]).name)
    raise invalid(f"the format of the job's input does not follow from the suffix of '{shown}': set the input format")


def _suffix(file: InputFile) -> str:
    return os.path.splitext(file.name)[1].lower()
