"""`ServerProcess`: a `weir serve` started by a Python program and bound to its lifetime.

The program's side is `ServerProcess`, the server's side is `parent_fd`. The server stops when the program exits for any
reason, and leaves no process, no shared memory and no file behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from weir.errors import StartError
from weir.runtime.readiness import READY_FD

_COMMAND = (sys.executable, "-P", "-m", "weir", "serve")

_LOG_LINES = 20
_STOP_GRACE_S = 20.0
"""Additional time for the stop after running requests have ended: the broker is stopped then."""


class ServerProcess:
    """Starts `weir serve` with the given arguments. `exit_timeout_s` is the time it gives running requests at a stop.

    `environment` is added to this process's, and holds the secrets among the options (`weir.options.secret`).

    Its log goes to an unnamed temporary file.
    """

    def __init__(
        self, arguments: Sequence[str], exit_timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._ready_fd, announced = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env={**_environment(announced), **(environment or {})},
                pass_fds=(announced,),
                start_new_session=True,
            )
        except OSError:
            os.close(self._ready_fd)
            self._log.close()
            raise
        finally:
            os.close(announced)
        self.pid = self._process.pid
        # Runs also when the program exits without stopping the server, and when this object is collected.
        self._end = weakref.finalize(self, _end, self._process, exit_timeout_s + _STOP_GRACE_S, os.getpid())

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """Wait until the server is ready and return its addresses by protocol.

        Raises StartError with the last lines of its log if it can't start; it has exited then.
        """
        try:
            line = self._announcement(time.monotonic() + timeout_s)
            announced: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
            if not announced.pop("ready", False):
                raise StartError(self._why_not(announced.get("error"), timeout_s))
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(self._ready_fd)
        return announced

    def log(self) -> str:
        """The log so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def stop(self) -> None:
        """Stop the server; returns once all its processes have exited."""
        self._end()
        self._log.close()

    def _announcement(self, deadline: float) -> bytes:
        """Read the ready line; an incomplete line means that the server exited or the deadline passed."""
        line = b""
        # Not select(), which fails for high file descriptors: the program may have many open files.
        poll = select.poll()
        poll.register(self._ready_fd, select.POLLIN)
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                break
            chunk = os.read(self._ready_fd, 65536)
            if not chunk:
                # The server has exited or is about to.
                self._process.wait()
                break
            line += chunk
        return line

    def _why_not(self, error: str | None, timeout_s: float) -> str:
        if error is None:
            status = self._process.poll()
            error = f"not ready after {timeout_s:g} s" if status is None else f"it exited with status {status}"
        lines = self.log().splitlines()[-_LOG_LINES:]
        return "\n".join([f"the server can't start: {error}", *(f"    {line}" for line in lines)])


def _environment(announced: int) -> dict[str, str]:
    # WEIR_ variables in the program's environment are not meant for this server.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    return {**kept, READY_FD: str(announced), PARENT_PID: str(os.getpid())}


def _end(process: subprocess.Popen[bytes], timeout_s: float, owner_pid: int) -> None:
    # A forked child of the program has a copy of this finalizer, and must not stop the server.
    if os.getpid() != owner_pid:
        return
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


PARENT_PID = "WEIR_PARENT_PID"
"""Environment variable with the process id of the program that started this server."""


@contextlib.contextmanager
def parent_fd() -> Iterator[int | None]:
    """A file descriptor that becomes readable when the program that started this server exits; None without a program.

    Not the parent-death signal: it is sent when the thread that started the server ends, and leaves no time to clean up.
    Raises StartError if the program has exited already.
    """
    # Removed from the environment: child processes are bound to this server, not to the program.
    text = os.environ.pop(PARENT_PID, None)
    if text is None:
        yield None
        return
    try:
        fd = os.pidfd_open(int(text))
    except ProcessLookupError:
        raise StartError("the program that started this server has exited") from None
    try:
        if os.getppid() != int(text):
            raise StartError("the program that started this server has exited")
        yield fd
    finally:
        os.close(fd)
