"""The process that reads the Parquet files of one job, for `weir.jobs.formats.parquet_reader`; it ends with its parent.

What hostile files expand to is the memory of this process, which is limited: RLIMIT_DATA counts private writable memory,
which the C library allocates for Arrow, and an allocation beyond it fails as an error of its row group.

A request is a memory file with its fields (msgpack), the file to read, and a pipe, which come as descriptors over a socket.
The response is frames in the pipe: the sizes of a message (msgpack) and of the content that follows it, both after that.
A parent that closes its end of the pipe ends the response. The pipe is the flow control: what is in it, and one frame, is
all that is read ahead.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

import msgspec

from weir.jobs.formats.items import DeclaredInput, KeptColumn
from weir.jobs.formats.parquet import arrow
from weir.jobs.formats.parquet_rows import FailedRows, ParquetRows, RowEvent
from weir.runtime.offload_process import become_helper, memory_status_bytes, read_parts
from weir.schemas.core.errors import ErrorCode, WeirError

FRAME_BYTES = 1 << 20
"""A frame ends with the row that exceeds this content."""

FRAME_ROWS = 1024

SIZES = struct.Struct("=QQ")
"""Bytes of the message of a frame, and of its content."""

REQUEST_DESCRIPTORS = 3
"""Of each request: its memory file, the file to read, and the writing end of the pipe."""


class Problem(msgspec.Struct, array_like=True):
    """An error; its text may have characters that are not valid Unicode."""

    code: int
    text: bytes

    @classmethod
    def of(cls, error: WeirError) -> Problem:
        """`error`, to be sent."""
        return cls(error.code.number, error.message.encode(errors="surrogatepass"))

    def error(self) -> WeirError:
        """The error that was sent."""
        return WeirError(ErrorCode.from_number(self.code), self.text.decode(errors="surrogatepass"))


class ReadRequest(msgspec.Struct):
    """Which rows to read: from `start` on; None for their number alone. `name` is that of the file in errors; `columns` is
    described at `ParquetRows`, `given_up` at `ParquetRows.rows`.
    """

    name: str
    inputs: list[DeclaredInput]
    columns: list[str]
    start: int | None = None
    given_up: Problem | None = None


class Count(msgspec.Struct, array_like=True, tag=True):
    """How many rows the file has, and the columns that results repeat; the only message of a request for them."""

    rows: int
    kept: list[KeptColumn]


class SentTensor(msgspec.Struct, array_like=True):
    """A tensor whose content of `size_bytes` is the next in the frame. `place` is that of its input in the request, or,
    after those, of its column in `Count.kept`.
    """

    place: int
    shape: tuple[int, ...]
    size_bytes: int


class Rows(msgspec.Struct, array_like=True, tag=True):
    """The next rows: the tensors of each, or the text of its error (INVALID_ARG) as that of a `Problem`."""

    rows: list[list[SentTensor] | bytes]


class Failed(msgspec.Struct, array_like=True, tag=True):
    """As `FailedRows`."""

    end: int
    problem: Problem


class Refused(msgspec.Struct, array_like=True, tag=True):
    """The last message of a file of which nothing more can be read."""

    problem: Problem


class Ended(msgspec.Struct, array_like=True, tag=True):
    """The last message."""


Message = Count | Rows | Failed | Refused | Ended


def main() -> None:
    """Serves the socket whose descriptor is the first argument, until its other end is closed. The second is the memory in
    bytes that reading may take, beside what the process has when it begins.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    memory_bytes = int(sys.argv[2])
    become_helper()
    with contextlib.suppress(WeirError):  # without pyarrow each file is refused
        # It reads one file at a time. The stack of each further thread would be memory that reading has not asked for.
        arrow().set_io_thread_count(1)
    limit_bytes = memory_status_bytes("VmData") + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 64, REQUEST_DESCRIPTORS)
        if not message:
            return
        try:
            request = msgspec.msgpack.decode(read_parts(fds[0])[0], type=ReadRequest)
            serve(request, fds[1], fds[2], memory_bytes)
        except BrokenPipeError:
            pass  # the parent has stopped reading
        finally:
            os.close(fds[1])
            os.close(fds[2])


def serve(request: ReadRequest, fd: int, pipe: int, memory_bytes: int) -> None:
    """Writes the response to `request` about the file `fd` into `pipe`. Raises BrokenPipeError where that is closed."""
    inputs = {declared.name: declared for declared in request.inputs}
    try:
        opened = ParquetRows(fd, request.name, inputs, memory_bytes, request.columns)
        if request.start is None:
            _write(pipe, Count(opened.count(), opened.kept))
            return
        given_up = None if request.given_up is None else request.given_up.error()
        names = [*inputs, *(column.name for column in opened.kept)]
        _write_rows(pipe, names, opened.rows(request.start, given_up))
        _write(pipe, Ended())
    except WeirError as error:
        _write(pipe, Refused(Problem.of(error)))


def _write_rows(pipe: int, names: list[str], events: Iterator[RowEvent]) -> None:
    places = {name: place for place, name in enumerate(names)}
    rows: list[list[SentTensor] | bytes] = []
    contents: list[bytes | memoryview] = []
    size_bytes = 0
    try:
        for event in events:
            if isinstance(event, FailedRows):
                _write(pipe, Rows(rows), contents)
                rows, contents, size_bytes = [], [], 0
                _write(pipe, Failed(event.end, Problem.of(event.error)))
                continue
            if isinstance(event, WeirError):
                rows.append(event.message.encode(errors="surrogatepass"))
            else:
                row: list[SentTensor] = []
                for tensor in event:
                    assert not isinstance(tensor.data, tuple)  # noqa: S101 - it was read
                    row.append(SentTensor(places[tensor.name], tuple(tensor.shape), len(tensor.data)))
                    contents.append(tensor.data)
                    size_bytes += len(tensor.data)
                    del tensor
                rows.append(row)
            del event  # or it would be held while the next row is made
            if size_bytes >= FRAME_BYTES or len(rows) >= FRAME_ROWS:
                _write(pipe, Rows(rows), contents)
                rows, contents, size_bytes = [], [], 0
    except WeirError:
        _write(pipe, Rows(rows), contents)  # those before the end of what can be read
        raise
    _write(pipe, Rows(rows), contents)


def _write(pipe: int, message: Message, contents: Sequence[bytes | memoryview] = ()) -> None:
    text = msgspec.msgpack.encode(message)
    head = SIZES.pack(len(text), sum(map(len, contents))) + text
    pieces: list[bytes | memoryview] = [head, *contents]
    for place in range(0, len(pieces), _MAX_PIECES):
        some = pieces[place : place + _MAX_PIECES]
        written = os.writev(pipe, some)
        if written == sum(map(len, some)):
            continue
        for piece in some:
            view = memoryview(piece)[min(written, len(piece)) :]
            written -= len(piece) - len(view)
            while view:
                view = view[os.write(pipe, view) :]


_MAX_PIECES = 1024
"""IOV_MAX of Linux."""


if __name__ == "__main__":
    main()
