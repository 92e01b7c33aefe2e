"""`ServerProcess`: one `weir serve` as a child of a Python program, tied to it.

Promises: it ends when the program does, however that comes about; it leaves no process, no shared memory and no file.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import IO, Any

from weir.parent import PARENT_PID
from weir.start_error import StartError

READY_FD = "WEIR_READY_FD"
"""Names the pipe for the ready line. That of `telemetry.readiness`, which a program can't import (`weir.own_packages`)."""

_COMMAND = (sys.executable, "-P", "-m", "weir", "serve")

_LOG_LINES = 20
_STOP_GRACE_S = 20.0
"""What the end may take beyond the time that running requests have: the message bus is stopped then."""


class ServerProcess:
    """A server with the options `words`, started; `exit_timeout_s` is the time that it gives to running requests.

    Its log goes to a file without a name, which nothing has to remove.
    """

    def __init__(self, words: Sequence[str], exit_timeout_s: float) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._ready_fd, announced = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=_environment(announced),
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
        # Also when the program ends without having stopped it, and when nobody holds it any more.
        self._end = weakref.finalize(self, _end, self._process, exit_timeout_s + _STOP_GRACE_S, os.getpid())

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """Where it listens, by door, once it is ready.

        Raises StartError with the last lines of its log when it can't start; it has ended then.
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
        """What it has logged."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def stop(self) -> None:
        """End it; returns once nothing of it runs any more."""
        self._end()
        self._log.close()

    def _announcement(self, deadline: float) -> bytes:
        """The line it announces itself with; less than a line when it ends before, or takes longer."""
        line = b""
        # Not select(), which can't wait for high numbers: a program may have many files open.
        poll = select.poll()
        poll.register(self._ready_fd, select.POLLIN)
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                break
            chunk = os.read(self._ready_fd, 65536)
            if not chunk:
                # It has ended, or is about to.
                self._process.wait()
                break
            line += chunk
        return line

    def _why_not(self, error: str | None, timeout_s: float) -> str:
        if error is None:
            status = self._process.poll()
            error = f"it is not ready after {timeout_s:g} s" if status is None else f"it ended with status {status}"
        lines = self.log().splitlines()[-_LOG_LINES:]
        return "\n".join([f"the server can't start: {error}", *(f"    {line}" for line in lines)])


def _environment(announced: int) -> dict[str, str]:
    # Settings of ours that happen to be in the program's environment are meant for another server.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    return {**kept, READY_FD: str(announced), PARENT_PID: str(os.getpid())}


def _end(process: subprocess.Popen[bytes], patience_s: float, owner: int) -> None:
    # A fork of the program has a copy of this, and must leave the server alone.
    if os.getpid() != owner:
        return
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
