"""`run_weir`: runs `weir` commands as forks of a process that has imported Weir.

Importing is most of the cost of a start, and the tests start hundreds of commands. `PreparedWeir` is that process, one
per process of pytest. Its children are `ForkedRole`s, as those of `weir serve`, with the `main` of the command line.
The tests of the documentation and of the supervisor start the command as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.pause_points import install
from weir.runtime.child_processes import dies_with_parent
from weir.supervisor.forked_role import ForkedRole, import_roles

COMMAND = (sys.executable, "-P", "-m", "weir")
_MESSAGE_BYTES = 1 << 20
_LOOK_S = 0.02


class WeirProcess:
    """One command that runs: of `subprocess.Popen` it has what tests use."""

    def __init__(self, prepared: PreparedWeir, pid: int) -> None:
        self._prepared = prepared
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status if it has ended: negative where a signal ended it."""
        if self.returncode is None:
            self.returncode = self._prepared.status_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its status once it has ended. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(COMMAND, timeout or 0)
            self._prepared.wait(_LOOK_S)
        return status

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Tells it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


class PreparedWeir:
    """A process that has imported Weir and forks commands. It ends with its children when this process ends."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: value for name, value in os.environ.items() if not name.startswith("WEIR_")},
            )
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        atexit.register(self.close)

    def close(self) -> None:
        """Ends it, and what still runs of what it forked."""
        self._socket.close()
        self._process.wait()

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], out: int, errors: int, reply: int
    ) -> WeirProcess:
        """Runs `weir` and these words. `told` is where `environment` has a role announce itself, or -1."""
        files = [out, errors] + [reply] * (reply >= 0)
        message = {"words": list(words), "environment": dict(environment), "folder": os.getcwd(), "told": reply}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], files)
            while "pid" not in (answer := self._receive()):
                pass
        return WeirProcess(self, answer["pid"])

    def status_of(self, pid: int) -> int | None:
        """The status of one that has ended."""
        with self._lock:
            self._take_all()
            return self._statuses.get(pid)

    def wait(self, timeout_s: float) -> None:
        """Returns when one has ended, or after that time."""
        with self._lock:
            self._socket.settimeout(timeout_s)
            with contextlib.suppress(TimeoutError):
                self._receive()
            self._socket.settimeout(None)

    def _take_all(self) -> None:
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive()
        self._socket.setblocking(True)

    def _receive(self) -> dict[str, Any]:
        content = self._socket.recv(_MESSAGE_BYTES)
        assert content, "the process that starts weir has ended"
        answer: dict[str, Any] = json.loads(content)
        if "ended" in answer:
            self._statuses[answer["ended"]] = answer["status"]
        return answer


_module_path = os.environ.get("PYTHONPATH")
_prepared: list[PreparedWeir] = []


def run_weir(
    words: Sequence[str],
    environment: Mapping[str, str],
    out: int,
    errors: int,
    reply: int = -1,
    before: Sequence[str] = (),
) -> WeirProcess | subprocess.Popen[bytes]:
    """Runs `weir` and these words, as `PreparedWeir.run` does; that one is there from the first call on.

    Where a `PYTHONPATH` of its own makes it import something else than others, it is run as users do, and also where the
    words of a command stand `before` it, which becomes it.
    """
    if before or environment.get("PYTHONPATH") != _module_path:
        return subprocess.Popen(
            [*before, *COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=environment,
            pass_fds=[reply] * (reply >= 0),
            start_new_session=True,
            # Tests that are killed can't end it; then it, and all it has started, goes with them.
            preexec_fn=dies_with_parent(),
        )
    if not _prepared:
        _prepared.append(PreparedWeir())
    return _prepared[0].run(words, environment, out, errors, reply)


# The other side


def _serve(asked: socket.socket) -> None:
    import_roles()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    while True:
        readable, _, _ = select.select([asked, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _tell_ends(asked, running)
        if asked in readable:
            content, files, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 3)
            if not content:
                return
            running.add(pid := _fork(json.loads(content), files))
            asked.send(json.dumps({"pid": pid}).encode())


def _fork(message: dict[str, Any], files: list[int]) -> int:
    ours = [os.dup(number) for number in (1, 2)]
    for number, file in zip((1, 2), files, strict=False):
        os.dup2(file, number)
    environment = message["environment"]
    if message["told"] >= 0:
        names = [name for name, value in environment.items() if name.endswith("_FD") and value == str(message["told"])]
        environment.update(dict.fromkeys(names, str(files[2])))
    os.chdir(message["folder"])
    forked = ForkedRole(_main, message["words"], environment, files[2:], " ".join((*COMMAND, *message["words"])))
    for number, our in zip((1, 2), ours, strict=True):
        os.dup2(our, number)
    for file in (*ours, *files):
        os.close(file)
    return forked.pid


def _main(words: Sequence[str]) -> None:
    from weir.commands.app import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None  # what the environment of the one before said
    install()
    main(words)


def _tell_ends(asked: socket.socket, running: set[int]) -> None:
    for pid in sorted(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.discard(pid)
            asked.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


if __name__ == "__main__":
    import weir.commands.app

    sys.argv[0] = str(Path(weir.commands.app.__file__).with_name("__main__.py"))
    with socket.socket(fileno=int(sys.argv[1])) as _asked:
        _serve(_asked)
