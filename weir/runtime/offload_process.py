"""The helper process of `weir.runtime.offload`: takes one job at a time, and ends with its parent.

A job is an operation ("module:function" of our own code, never of a client) and a memory file with its input. The function
gets the parts of the input as views, and returns the parts of its result; a part may be an iterable of pieces, which are
written as they come. Both memory files begin with the number of parts and their sizes (`Q` each, in the machine's order).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from weir.schemas.core.errors import WeirError, invalid

OK, REFUSED, FAILED = 0, 1, 2
"""How a job ended: with a result, with a `WeirError` (its number and text), or with a traceback."""

ANSWER = struct.Struct("<BB")
"""How a job ended, and whether the process ends with it."""

MAX_MEMORY_BYTES = 4 << 30
"""Memory of a helper process. A request that needs more is refused."""

RETIRE_BYTES = 1 << 30
"""A helper process that has ever held more ends after its job, for Python keeps memory that it has had once."""

NICENESS = 10
"""Event loops go first where processors are short."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIZE = struct.Struct("=Q")

Part = bytes | bytearray | memoryview
Result = Iterable[Part | Iterable[Part]]


def write_parts(fd: int, parts: Sequence[Part | Iterable[Part]]) -> None:
    """Writes `parts` to the memory file `fd`. Blocks; gives the interpreter's lock away while it copies."""
    offset = _SIZE.size * (1 + len(parts))
    os.lseek(fd, offset, os.SEEK_SET)
    sizes = [len(parts)]
    for part in parts:
        pieces = (part,) if isinstance(part, (bytes, bytearray, memoryview)) else part
        sizes.append(sum(_write_all(fd, piece) for piece in pieces))
    os.pwrite(fd, b"".join(map(_SIZE.pack, sizes)), 0)


def read_parts(fd: int) -> list[memoryview]:
    """The parts in the memory file `fd`, as views that keep the file alive; `fd` itself is closed."""
    try:
        view = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    (count,) = _SIZE.unpack_from(view)
    start = _SIZE.size * (1 + count)
    parts: list[memoryview] = []
    for number in range(count):
        (size,) = _SIZE.unpack_from(view, _SIZE.size * (1 + number))
        parts.append(view[start : start + size])
        start += size
    return parts


def _write_all(fd: int, piece: Part) -> int:
    view = memoryview(piece)
    written = 0
    while written < len(view):
        written += os.write(fd, view[written : written + (16 << 20)])
    return len(view)


def main() -> None:
    """Serves the socket whose descriptor is the only argument, until its other end is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    become_helper()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    gc.disable()  # a document has no cycles, and a collection would walk all of it
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        if not message:
            return
        status, answer_fd = _done(message.decode(), fds[0])
        # getrusage(2) also counts the program that has started this one, before execve(2).
        retires = memory_status_bytes("VmHWM") > RETIRE_BYTES
        socket.send_fds(connection, [ANSWER.pack(status, retires)], [answer_fd])
        os.close(answer_fd)
        if retires:
            return


def become_helper() -> None:
    """Has this process end with the thread that started it, and yield processors and memory to it where they are short."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit()
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory is short, this process goes, not its parent


def memory_status_bytes(field: str) -> int:
    """A size of this process in /proc/self/status: `VmHWM`, the most that was resident, or `VmData`, which RLIMIT_DATA
    limits. 0 where the kernel does not report it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _done(operation: str, fd: int) -> tuple[int, int]:
    """(how the job ended, the memory file with its result)."""
    answer_fd = os.memfd_create("weir-result", os.MFD_CLOEXEC)
    try:
        module, _, name = operation.partition(":")
        run = getattr(importlib.import_module(module), name)
        write_parts(answer_fd, list(run(read_parts(fd))))
        return OK, answer_fd
    except WeirError as error:
        problem, status = error, REFUSED
    except MemoryError:
        problem, status = invalid("the request takes too much memory to be read"), REFUSED
    except Exception:  # noqa: BLE001 - the parent logs it
        os.ftruncate(answer_fd, 0)
        write_parts(answer_fd, [traceback.format_exc().encode(errors="replace")])
        return FAILED, answer_fd
    os.ftruncate(answer_fd, 0)
    write_parts(answer_fd, [b"%d" % problem.code.number, problem.message.encode(errors="surrogatepass")])
    return status, answer_fd


if __name__ == "__main__":
    main()
