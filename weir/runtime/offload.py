"""`Offload`: work on large bodies, in helper processes, so that the event loop goes on meanwhile.

A thread would not do: one native call that holds the interpreter's lock (`orjson.loads` of 60 MB, `msgpack.unpackb`) stops
the event loop for its whole length, whichever thread makes it. And what a body becomes on its way, often ten times its
size, is not the gateway's memory here.

Processes are started when they are first needed, as fresh interpreters, and again when they have ended or were killed.
Bodies and results travel in memory files (memfd_create(2)): written once, mapped by the other side, nothing is unpickled.
At most `PROCESSES` jobs run at a time, at most one of them on a body of more than `LARGE_BYTES`: a small one never waits
for several large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

from weir.runtime.child_processes import environment_of_helpers
from weir.runtime.containment import report
from weir.runtime.offload_process import ANSWER, OK, REFUSED, Part, read_parts, write_parts
from weir.schemas.core.errors import ErrorCode, WeirError, overloaded, unavailable

OFF_LOOP_BYTES = 256 * 1024
"""A JSON or msgpack document of more than this is read in a helper process. In the event loop one of 256 KiB takes 1 to
10 ms (floats, one-character strings), one of 512 KiB 2 to 25 ms. The way to a helper process and back costs 1 to 10 ms,
and the first document waits for its start, about 0.5 s: bodies of 128 to 256 KiB are common, and rarely the slow kind."""

MAX_VALUES = 20_000
"""A shorter JSON document of more commas and brackets than this is read in a helper process too. One of 255 KiB has 87 000
empty strings, which take 10 to 25 ms, or 19 000 floats."""

SHORT_BYTES = 2 * MAX_VALUES
"""A document of at most this is read in the event loop: a value has a character and a comma at least."""

PROCESSES = 2
LARGE_BYTES = 1 << 20

MAX_WAITING = 256
"""Jobs that wait for a helper process. More are refused (UNAVAILABLE)."""

RUN_LIMIT_S = 60.0
"""The longest time for one job. Then its process is killed, and the job fails."""


def takes_long(document: bytes | bytearray | memoryview) -> bool:
    """Whether a helper process has to read this JSON, so that others can be served meanwhile."""
    if not SHORT_BYTES < len(document) <= OFF_LOOP_BYTES:
        return len(document) > OFF_LOOP_BYTES
    text = bytes(document) if isinstance(document, memoryview) else document
    return sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES


class ReadingFailed(WeirError):
    """INTERNAL: a helper process has failed, whatever the document in it was."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INTERNAL, message)


class Offload:
    """Runs operations in helper processes. All methods are called in one event loop; `close` ends the processes."""

    def __init__(self, processes: int = PROCESSES, run_limit_s: float = RUN_LIMIT_S) -> None:
        self._processes = processes
        self._run_limit_s = run_limit_s
        self._idle: list[_Helper] = []
        self._all: set[_Helper] = set()
        self._turns = asyncio.Semaphore(processes)
        self._large_turn = asyncio.Semaphore(1)
        self._tasks: set[asyncio.Task[list[memoryview]]] = set()

    def start(self, operation: str, parts: Sequence[Part]) -> asyncio.Task[list[memoryview]]:
        """As `run`, in a task. Raises WeirError (UNAVAILABLE) at once where too many jobs wait already.

        `parts` must not change until the task is done, also where it is cancelled.
        """
        if len(self._tasks) >= MAX_WAITING:
            raise overloaded("too many large requests wait to be read")
        task = asyncio.get_running_loop().create_task(self._run(operation, parts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, operation: str, parts: Sequence[Part]) -> list[memoryview]:
        """The parts of the result of `operation` ("module:function", see `weir.runtime.offload_process`) on `parts`.

        Raises WeirError: what the operation raises; UNAVAILABLE where too many wait, or it took too long; INTERNAL where
        it failed unexpectedly, which is logged, or its process died.
        """
        return await self.start(operation, parts)

    def close(self) -> None:
        """Ends everything, jobs under way included."""
        for task in list(self._tasks):
            task.cancel()
        for helper in list(self._all):
            self._drop(helper)

    @property
    def pids(self) -> list[int]:
        """The helper processes that run now."""
        return [helper.pid for helper in self._all]

    async def _run(self, operation: str, parts: Sequence[Part]) -> list[memoryview]:
        is_large = sum(map(len, parts)) > LARGE_BYTES
        async with self._turn(is_large):
            filling = asyncio.get_running_loop().run_in_executor(None, _filled, parts)
            try:
                fd = await asyncio.shield(filling)
            except asyncio.CancelledError:
                filling.add_done_callback(_close_filled)
                await asyncio.wait([filling])  # the thread reads `parts`
                raise
            try:
                status, answer_fd = await self._ask(operation, fd, is_large)
            finally:
                os.close(fd)
        if status == OK:
            return read_parts(answer_fd)
        words = [bytes(part) for part in read_parts(answer_fd)]
        if status == REFUSED:
            raise WeirError(ErrorCode.from_number(int(words[0])), words[1].decode(errors="surrogatepass"))
        report(f"weir.runtime.offload: {operation}", RuntimeError(words[0].decode(errors="replace")))
        raise ReadingFailed("internal server error")

    @contextlib.asynccontextmanager
    async def _turn(self, is_large: bool) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as turns:
            if is_large:
                await turns.enter_async_context(self._large_turn)
            await turns.enter_async_context(self._turns)
            yield

    async def _ask(self, operation: str, fd: int, is_large: bool) -> tuple[int, int]:
        helper = self._taken(is_large)
        while not helper.send(operation, fd):  # it was killed while it had nothing to do
            self._drop(helper)
            helper = self._taken(is_large)
        try:
            async with asyncio.timeout(self._run_limit_s):
                status, answer_fd, retires = await helper.answer()
        except TimeoutError:
            self._drop(helper)
            raise unavailable(f"the request was not read within {self._run_limit_s:.0f} s") from None
        except EOFError:
            self._drop(helper)
            raise ReadingFailed("the process that read the request has died") from None
        except BaseException:  # cancelled: its process still works on it
            self._drop(helper)
            raise
        if retires:
            self._drop(helper)
        else:
            self._idle.append(helper)
        return status, answer_fd

    def _taken(self, is_large: bool) -> _Helper:
        # A large job would make the next small one wait for the start of a process: it starts one itself.
        while self._idle and not (is_large and len(self._all) < self._processes):
            helper = self._idle.pop()
            if helper.is_alive:
                return helper
            self._drop(helper)
        try:
            helper = _Helper()
        except OSError as error:
            report("weir.runtime.offload: starting a helper process", error)
            raise unavailable("no process could be started to read the request") from error
        self._all.add(helper)
        return helper

    def _drop(self, helper: _Helper) -> None:
        self._all.discard(helper)
        with contextlib.suppress(ValueError):
            self._idle.remove(helper)
        helper.end()


class _Helper:
    """One helper process, which has at most one job."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._replied: asyncio.Future[tuple[int, int, bool]] | None = None
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "weir.runtime.offload_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**environment_of_helpers(), "OPENBLAS_NUM_THREADS": "1"},
                )
            except OSError:
                self._connection.close()
                raise
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection.fileno(), self._readable)
        self.is_alive = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, operation: str, fd: int) -> bool:
        """Gives the process a job; False where it has ended."""
        try:
            socket.send_fds(self._connection, [operation.encode()], [fd])
        except OSError:
            return False
        self._replied = self._loop.create_future()
        return True

    async def answer(self) -> tuple[int, int, bool]:
        """(how the job ended, the memory file with its result, whether the process ends with it).

        Raises EOFError where the process dies.
        """
        assert self._replied is not None  # noqa: S101 - it has a job
        try:
            return await self._replied
        finally:
            self._replied = None

    def end(self) -> None:
        """Kills the process. Data that it has sent is not read."""
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._connection.fileno())
        self.is_alive = False
        self._connection.close()
        self._process.kill()
        self._loop.run_in_executor(None, self._process.wait)

    def _readable(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._connection, 64, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        answer = self._replied
        if not message:
            self._loop.remove_reader(self._connection.fileno())
            self.is_alive = False
            if answer is not None and not answer.done():
                answer.set_exception(EOFError())
            return
        if answer is None or answer.done():
            os.close(fds[0])
            return
        status, retires = ANSWER.unpack(message)
        answer.set_result((status, fds[0], bool(retires)))


def _close_filled(filling: asyncio.Future[int]) -> None:
    if not filling.cancelled() and filling.exception() is None:
        os.close(filling.result())


def _filled(parts: Sequence[Part]) -> int:
    fd = os.memfd_create("weir-job", os.MFD_CLOEXEC)
    try:
        write_parts(fd, parts)
    except BaseException:
        os.close(fd)
        raise
    return fd
