"""`ParquetFile`: the items of one Parquet file, and `ParquetReader`: the process that reads the files of one job.

What a file expands to is not the memory of the process that runs the job, and a file that ends the reading process, or
holds it up, is an error of that file. The process is a fresh interpreter, started when a file is first read; nothing that
it sends is unpickled.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Protocol

import msgspec

from weir.jobs.formats.input_files import InputFile, open_regular, printable_name
from weir.jobs.formats.items import MAX_ITEM_BYTES, DeclaredInput, JobItem, KeptColumn
from weir.jobs.formats.parquet_process import (
    FRAME_BYTES,
    SIZES,
    Count,
    Ended,
    Failed,
    Message,
    Problem,
    ReadRequest,
    Refused,
    Rows,
)
from weir.jobs.formats.parquet_rows import READ_MEMORY_BYTES, FailedRows, RowEvent
from weir.runtime.child_processes import environment_of_helpers
from weir.runtime.offload_process import write_parts
from weir.schemas.core.errors import WeirError, invalid, unavailable
from weir.schemas.core.tensors import Tensor

READ_LIMIT_S = 60.0
"""The longest time for the next rows of a Parquet file. Then the process that reads it is killed."""

MAX_DEATHS = 3
"""How often the process may end while it reads one file. The rows after that are errors."""

_MOST_BYTES = FRAME_BYTES + MAX_ITEM_BYTES
_MOST_MESSAGE_BYTES = 16 << 20


class RowSource(Protocol):
    """What reads Parquet files. Both methods raise WeirError where the file, or its rest, can't be read."""

    def count(self, file: InputFile, inputs: list[DeclaredInput], columns: list[str]) -> Count:
        """The number of rows of a file, whose columns must match `inputs`, and the columns that results repeat. Of the
        file, `columns` are read, by default all.
        """
        ...

    def rows(
        self, file: InputFile, inputs: list[DeclaredInput], kept: list[KeptColumn], columns: list[str], start: int
    ) -> Iterator[RowEvent]:
        """The rows from number `start` on; `kept` is what `count` found."""
        ...


class ParquetFile:
    """One Parquet file, read by `source`, of which `columns` are read, by default all. `kept` are those that are no input.

    Reads the footer at once; raises WeirError unless it matches the model.
    """

    def __init__(
        self, file: InputFile, inputs: dict[str, DeclaredInput], source: RowSource, columns: Sequence[str] = ()
    ) -> None:
        self._file = file
        self._inputs = list(inputs.values())
        self._source = source
        self._columns = list(columns)
        found = source.count(file, self._inputs, self._columns)
        self._count, self.kept = found.rows, found.kept
        self._names = {column.name for column in found.kept}

    def differs_from(self, other: ParquetFile) -> str:
        """What to say of a file that has the columns to repeat with other types than `other`."""
        mine, theirs = next(pair for pair in zip(self.kept, other.kept, strict=True) if pair[0] != pair[1])
        return (
            f"'{printable_name(self._file.name)}': column '{mine.name}' holds {mine.datatype}, but {theirs.datatype} in "
            f"'{printable_name(other._file.name)}': the files of a job have one type for it"
        )

    def count(self) -> int:
        """Implements `ItemFile`."""
        return self._count

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """Implements `ItemFile`."""
        name, offset, row = printable_name(self._file.name), first_number - start, start
        for event in self._source.rows(self._file, self._inputs, self.kept, self._columns, start):
            if isinstance(event, FailedRows):
                for failed in range(row, event.end):
                    yield JobItem(failed + offset, f"{name}[{failed}]", event.error)
                row = event.end
            elif self._names and not isinstance(event, WeirError):
                inputs = [tensor for tensor in event if tensor.name not in self._names]
                kept = [tensor for tensor in event if tensor.name in self._names]
                yield JobItem(row + offset, f"{name}[{row}]", inputs, kept=kept)
                row += 1
            else:
                yield JobItem(row + offset, f"{name}[{row}]", event)
                row += 1


class ParquetReader:
    """Reads Parquet files in a process of its own, which may take `memory_bytes` for it. `close` ends the process.

    Methods block; one thread at a time may use them. The process also ends with the thread that reads first, and when its
    parent dies in any way.
    """

    def __init__(self, memory_bytes: int = READ_MEMORY_BYTES, read_limit_s: float = READ_LIMIT_S) -> None:
        self._memory_bytes = memory_bytes
        self._read_limit_s = read_limit_s
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process, None where none runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the process. Nothing can be read afterwards. May be called repeatedly."""
        self._is_closed = True
        self._end()

    def count(self, file: InputFile, inputs: list[DeclaredInput], columns: list[str]) -> Count:
        """Implements `RowSource`."""
        try:
            with closing(self._ask(file, ReadRequest(printable_name(file.name), inputs, columns))) as frames:
                message, _ = frames.next()
        except _ReaderDiedError as death:
            raise death.error(file) from None
        if isinstance(message, Refused):
            raise message.problem.error()
        assert isinstance(message, Count)  # noqa: S101 - what was asked for
        return message

    def rows(
        self, file: InputFile, inputs: list[DeclaredInput], kept: list[KeptColumn], columns: list[str], start: int
    ) -> Iterator[RowEvent]:
        """Implements `RowSource`. Where the process ends or hangs, the rest of the row group has that error."""
        row, deaths, given_up = start, 0, None
        sent = [(declared.name, declared.datatype) for declared in inputs]
        sent += [(column.name, column.datatype) for column in kept]
        while True:
            request = ReadRequest(printable_name(file.name), inputs, columns, row, given_up)
            try:
                with closing(self._ask(file, request)) as frames:
                    for event in _events(frames, sent):
                        row = event.end if isinstance(event, FailedRows) else row + 1
                        yield event
                return
            except _ReaderDiedError as death:
                error = death.error(file)
                deaths += 1
                if deaths == MAX_DEATHS:
                    raise error from None
                given_up = Problem.of(error)

    def _ask(self, file: InputFile, request: ReadRequest) -> _Frames:
        """Sends a request, and returns the frames of its response."""
        source = open_regular(file)
        reading = -1
        try:
            fields = os.memfd_create("weir-read", os.MFD_CLOEXEC)
            try:
                write_parts(fields, [msgspec.msgpack.encode(request)])
                reading, writing = os.pipe()
                try:
                    self._send([fields, source, writing], printable_name(file.name))
                finally:
                    os.close(writing)
            finally:
                os.close(fields)
        except BaseException:
            if reading >= 0:
                os.close(reading)
            raise
        finally:
            os.close(source)
        return _Frames(reading, self)

    def _send(self, fds: list[int], name: str) -> None:
        for is_last in (False, True):
            try:
                if self._connection is None:
                    self._start()
                assert self._connection is not None  # noqa: S101 - just started
                socket.send_fds(self._connection, [b"read"], fds)
                return
            except OSError as error:  # it could not be started, or was killed while it had nothing to do
                self._end()
                if is_last:
                    raise unavailable(
                        f"no process could be started to read '{name}': {error.strerror or type(error).__name__}"
                    ) from None

    def _start(self) -> None:
        if self._is_closed:
            raise ValueError("the reader is closed")
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "weir.jobs.formats.parquet_process",
                        str(theirs.fileno()),
                        str(self._memory_bytes),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**environment_of_helpers(), **_ENVIRONMENT},
                )
            except OSError:
                connection.close()
                raise
        self._connection = connection

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ended_how(self) -> str:
        """How the process ended that closed its pipe, or hangs; kills the one that hangs."""
        process = self._process
        if process is None:
            return "was ended"
        try:
            status = process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._end()
            return "was ended"
        self._end()
        return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    def wait(self, pipe: int) -> None:
        """Waits for data in `pipe`. Raises _ReaderDiedError where there is none in time: the process is killed."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if not poll.poll(self._read_limit_s * 1000):
            self._end()
            raise _ReaderDiedError(f"had no next rows within {self._read_limit_s:g} s, and was ended")


_ENVIRONMENT = {
    # Allocators that keep memory, or reserve it in large pieces, would reach the limit with little in use.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}


class _ReaderDiedError(Exception):
    """The process has ended in the middle of a response; the text says how."""

    def error(self, file: InputFile) -> WeirError:
        return invalid(
            f"'{printable_name(file.name)}' can't be read: the process that reads it {self}. Check the file with another "
            "program, or write it anew"
        )


class _Frames:
    """The frames of one response. `close` ends it."""

    def __init__(self, pipe: int, reader: ParquetReader) -> None:
        self._pipe = pipe
        self._reader = reader

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def next(self) -> tuple[Message, memoryview]:
        """The next message and its content. Raises _ReaderDiedError."""
        message_bytes, content_bytes = SIZES.unpack(self._read(SIZES.size))
        if message_bytes > _MOST_MESSAGE_BYTES or content_bytes > _MOST_BYTES:
            raise _ReaderDiedError(f"sent {message_bytes + content_bytes} bytes at once")
        try:
            message = _decoder.decode(self._read(message_bytes))
        except msgspec.MsgspecError as error:
            raise _ReaderDiedError(f"sent what is no message: {error}") from None
        return message, memoryview(self._read(content_bytes)).toreadonly()

    def _read(self, size_bytes: int) -> bytearray:
        content = bytearray(size_bytes)
        view = memoryview(content)
        while view:
            self._reader.wait(self._pipe)
            read_bytes = os.readv(self._pipe, [view])
            if not read_bytes:
                raise _ReaderDiedError(self._reader.ended_how())
            view = view[read_bytes:]
        return content


_decoder = msgspec.msgpack.Decoder(Message)


def _events(frames: _Frames, columns: list[tuple[str, str]]) -> Iterator[RowEvent]:
    """What a response contains; `columns` are names and datatypes. Raises WeirError where the rest of the file can't be
    read, and _ReaderDiedError.
    """
    while True:
        message, content = frames.next()
        if isinstance(message, Rows):
            at = 0
            for row in message.rows:
                if isinstance(row, bytes):
                    yield invalid(row.decode(errors="surrogatepass"))
                    continue
                tensors: list[Tensor] = []
                for sent in row:
                    end = at + sent.size_bytes
                    tensors.append(Tensor(*columns[sent.place], sent.shape, content[at:end]))
                    at = end
                yield tensors
        elif isinstance(message, Failed):
            yield FailedRows(message.end, message.problem.error())
        elif isinstance(message, Refused):
            raise message.problem.error()
        else:
            assert isinstance(message, Ended)  # noqa: S101 - there are no others
            return
