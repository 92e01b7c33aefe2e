"""`JobOutput`: the folder of a job's results, in shards, each of which is there as a whole or not at all.

A shard is written under a hidden name, synced, and given its own name, which tells the items it holds. So the names alone
tell how far the job has come, whatever died in between. A folder has one writer: one that was taken for dead and goes on
finds the next shard there already, and is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, BinaryIO

import orjson

from gateway.jobs.files.items import ItemResult
from gateway.jobs.files.json_shards import JsonShards
from gateway.jobs.files.numpy_shards import NumpyShards
from gateway.jobs.files.parquet_shards import ParquetShards
from gateway.jobs.files.shard_format import ShardFormat
from schemas.errors import WeirError, internal, invalid, unavailable
from schemas.model_config import ModelOutput

SUMMARY = "summary.json"
LOCK = ".lock"
LOCK_PATIENCE_S = 10.0
"""Wait for another writer of the same folder, who holds the lock only to name a shard."""

_SHARD = re.compile(r"part-(\d{10})-(\d{10})(\.[a-z]+)")
_UNFINISHED = re.compile(r"\.(?:part-\d{10}-\d{10}\.[a-z]+|summary\.json)\.\d+\.tmp")


class OutputFormat(StrEnum):
    """How shards are written."""

    JSONL = "jsonl"
    NPZ = "npz"
    PARQUET = "parquet"


class JobOutput:
    """The results of one job in `folder`, which is made if need be. Blocking: for threads only.

    All methods raise WeirError: UNAVAILABLE, which may pass, where the folder can't be written (a full disk, above all);
    INVALID_ARG where it holds something else than this job's shards.
    """

    def __init__(
        self, folder: str | os.PathLike[str], format: OutputFormat | str, model_outputs: Sequence[ModelOutput]
    ) -> None:
        self._folder = os.fspath(folder)
        self._format = _shard_format(format, model_outputs)
        with _writing():
            os.makedirs(self._folder, exist_ok=True)
            with self._locked():
                for name in os.listdir(self._folder):
                    if _UNFINISHED.fullmatch(name):
                        os.unlink(os.path.join(self._folder, name))

    def covered(self) -> int:
        """The number of the first item that no shard holds."""
        with _writing():
            shards = self._shards()
        return shards[-1][1] + 1 if shards else 0

    def write(self, first: int, results: Sequence[ItemResult]) -> int:
        """Write the shard of `results`, all items from number `first` on, and return how many of them are failures.

        When it returns, the shard is on disk; when it raises, nothing of it is there, and it can be written again.
        An item whose outputs the format can't hold becomes a failure.
        """
        if not results or any(result.number != first + place for place, result in enumerate(results)):
            raise internal(f"the results from item {first} on are not in order")

        def fill(file: BinaryIO) -> int:
            return self._format.write(file, results)

        def check() -> None:
            shards = self._shards()
            covered = shards[-1][1] + 1 if shards else 0
            if covered != first:
                raise invalid(f"the output is written up to item {covered}, not {first}: another writes it too")

        return self._store(_shard_name(first, first + len(results) - 1, self._format.suffix), fill, check)

    def failures(self) -> Iterator[tuple[int, list[int]]]:
        """(first item of the shard, numbers of the items that failed) of each shard that has any, in order."""
        with _writing():
            shards = self._shards()
        for first, last in shards:
            with self._reading(first, last) as file:
                failed = self._format.failed(file)
            if failed:
                yield first, failed

    def rewrite(self, first: int, results: Sequence[ItemResult]) -> int:
        """Put `results`, of any items of the shard that begins at `first`, in place of what it holds of them.

        Returns how many failures are left in the shard.
        """
        with _writing(), self._locked():
            last = next((end for begin, end in self._shards() if begin == first), None)
            if last is None or any(not first <= result.number <= last for result in results):
                raise internal(f"no shard begins at item {first} and holds these items")
            with self._reading(first, last) as old:

                def fill(file: BinaryIO) -> int:
                    return self._format.replace(old, file, sorted(results, key=lambda result: result.number))

                return self._write_file(_shard_name(first, last, self._format.suffix), fill, None)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary` beside the shards: the job is complete."""
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        self._store(SUMMARY, lambda file: file.write(text), None)
        with _ignoring_missing():
            os.unlink(os.path.join(self._folder, LOCK))

    def _shards(self) -> list[tuple[int, int]]:
        """(first, last) of the shards, in order. Raises WeirError where items are missing between them, or are twice."""
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
        with _writing():
            return self._write_file(name, fill, check)

    def _write_file(self, name: str, fill: Callable[[BinaryIO], int], check: Callable[[], None] | None) -> int:
        final = os.path.join(self._folder, name)
        unfinished = os.path.join(self._folder, f".{name}.{os.getpid()}.tmp")
        try:
            with open(unfinished, "wb") as file:
                told = fill(file)
                file.flush()
                os.fsync(file.fileno())
            if check is None:
                os.replace(unfinished, final)
            else:
                with self._locked():
                    check()
                    os.replace(unfinished, final)
            self._sync_folder()
            return told
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
        """Nobody else names a shard meanwhile."""
        with open(os.path.join(self._folder, LOCK), "wb") as file:
            give_up = time.monotonic() + LOCK_PATIENCE_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise unavailable("another writes the job's output, and does not end") from None
                    time.sleep(0.01)
            yield

    @contextmanager
    def _reading(self, first: int, last: int) -> Iterator[BinaryIO]:
        name = _shard_name(first, last, self._format.suffix)
        try:
            with open(os.path.join(self._folder, name), "rb") as file:
                yield file
        except ValueError as error:
            raise invalid(f"'{name}' is no shard of a job: {error}") from None


def _shard_format(format: OutputFormat | str, outputs: Sequence[ModelOutput]) -> ShardFormat:
    if format == OutputFormat.JSONL:
        return JsonShards(outputs)
    if format == OutputFormat.NPZ:
        return NumpyShards(outputs)
    if format == OutputFormat.PARQUET:
        return ParquetShards(outputs)
    raise invalid(f"unknown output format '{format}': it is one of {', '.join(OutputFormat)}")


def _shard_name(first: int, last: int, suffix: str) -> str:
    return f"part-{first:010}-{last:010}{suffix}"


@contextmanager
def _ignoring_missing() -> Iterator[None]:
    try:
        yield
    except OSError:
        pass


@contextmanager
def _writing() -> Iterator[None]:
    """What goes wrong with files may pass: the job pauses, and loses nothing."""
    try:
        yield
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(error: OSError) -> WeirError:
    return unavailable(f"the job's output can't be written: {error.strerror or type(error).__name__}")
