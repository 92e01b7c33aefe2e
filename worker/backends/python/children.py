"""Starts the processes of Python models: as forks of a fork server where that makes no difference, else as commands.

Importing Python, numpy and the stub takes most of the time in which a small model loads, or a process that crashed is
replaced. The fork server (`weir.worker.python_stub._weir_fork_server`) has imported them once, without user code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from weir.worker.backends.python.environment import WORKER_ENVIRONMENT, PythonEnvironment
from weir.worker.devices.host_policy import UNBOUND, HostPolicy
from weir.worker.python_stub._weir_fork_server import ARGUMENT, MAX_FDS, MAX_REQUEST_BYTES, STATUS

logger = logging.getLogger("weir.worker")

START_TIMEOUT_S = 30.0
"""How long the fork server may take to start; after that processes are started as commands."""

STARTUP_PREFIXES = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "KMP_", "NPY_", "MALLOC_", "GLIBC_")
"""Variables that are read when Python or a library starts. Where they differ from the fork server's, nothing is forked."""

_STUB = (Path(__file__).parents[2] / "python_stub" / "stub.py").resolve()  # as Python puts its folder on the path
_STANDARD_FDS = (1, 2)
_RELEASE_TIMEOUT_S = 1.0

# The kernel's parent-death signal follows the thread that started a process, so one lasting thread starts them all.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="python-model-starter")


class Child:
    """A process of a model, which leads a process group. For any thread.

    `reap` waits for its end, frees its id, and returns how it ended. `has_id` tells whether the id is still its own.
    """

    def __init__(self, pid: int, reap: Callable[[], int], has_id: Callable[[], bool] = lambda: True) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """How it ended (as `subprocess.Popen.returncode`), None until `release` has returned."""
        self._pidfd = os.pidfd_open(pid)
        self._reap = reap
        self._has_id = has_id
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the process has ended, at most `timeout_s`. Its id stays taken."""
        with self._lock:
            if self.returncode is None:
                _wait_for_exit(self._pidfd, timeout_s)

    def kill_group(self) -> None:
        """Kills the process and those it has started. Not after `release`."""
        if self._has_id():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> int:
        """Waits for the end of the process, frees its id, and returns its `returncode`."""
        with self._lock:
            if self.returncode is None:
                _wait_for_exit(self._pidfd, None)
                self.returncode = self._reap()
                os.close(self._pidfd)
            return self.returncode


def _forked(status: socket.socket, server: subprocess.Popen[bytes]) -> Child:
    """A process that the fork server forks; `status` is the worker's end of its status socket. Raises OSError."""

    def reap() -> int:
        ending = _received(status)
        status.settimeout(_RELEASE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            status.shutdown(socket.SHUT_WR)
        _received(status)  # the server closes its end when it has released the id
        status.close()
        return -signal.SIGKILL if ending is None else ending

    status.settimeout(START_TIMEOUT_S)
    try:
        pid = _received(status)
        if pid is None:
            raise ChildProcessError("the fork server of Python models did not start a process")
        if pid <= 0:
            raise OSError(-pid, os.strerror(-pid))
        # Without the fork server, whose death kills the process, the id may belong to another one.
        child = Child(pid, reap, lambda: server.poll() is None)
    except BaseException:
        status.close()  # the server kills a process that it still forks
        raise
    status.settimeout(None)
    return child


class _ForkServer:
    """The fork server of this process, started with the first use, and again if it died. For the starter's thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._startup: dict[str, str] = {}
        self._is_fit = True

    def fork(self, arguments: Sequence[str], fds: Sequence[int], variables: Mapping[str, str]) -> Child | None:
        """A new process; None where it must be started as a command. Raises OSError."""
        server = self._started(variables)
        if server is None:
            return None
        request = {
            "arguments": list(arguments),
            "variables": dict(variables),
            "cwd": os.getcwd(),
            "cpus": list(os.sched_getaffinity(0)),
        }
        packed = json.dumps(request).encode()
        if self._control is None or len(packed) > MAX_REQUEST_BYTES or 1 + len(_STANDARD_FDS) + len(fds) > MAX_FDS:
            return None
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [packed], [theirs.fileno(), *_STANDARD_FDS, *fds])
            except OSError:
                status.close()
                return None
        return _forked(status, server)

    def _started(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """The server, if it suits a process with these variables."""
        startup = {name: value for name, value in variables.items() if name.startswith(STARTUP_PREFIXES)}
        if self._process is not None and self._process.poll() is None:
            return self._process if startup == self._startup else None
        if not self._is_fit:
            return None
        self._startup = startup
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_STUB), ARGUMENT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(variables),
                start_new_session=True,
            )
        self._control.settimeout(START_TIMEOUT_S)
        threads = _received(self._control)
        self._control.settimeout(None)
        if threads != 1:
            # A process that is forked from several threads may hold locks that are never released.
            logger.warning(
                "the processes of Python models are started one by one: their fork server %s",
                "did not start" if threads is None else f"has {threads} threads, which a library has started",
            )
            self._is_fit = False
            self._process.kill()
            self._process.wait()
            return None
        return self._process


_FORK_SERVER = _ForkServer()


def start_stub(
    arguments: Sequence[str], fds: Sequence[int], environment: PythonEnvironment, policy: HostPolicy
) -> Child:
    """A process that runs the stub with these files and arguments, under `policy`. Raises OSError."""
    return _starter.submit(_start, arguments, fds, environment, policy).result()


def _start(arguments: Sequence[str], fds: Sequence[int], environment: PythonEnvironment, policy: HostPolicy) -> Child:
    policy.bind()  # a process starts on the CPUs of the thread that starts it
    variables = environment.variables()
    if environment.interpreter == WORKER_ENVIRONMENT.interpreter and policy == UNBOUND:
        forked = _FORK_SERVER.fork(arguments, fds, variables)
        if forked is not None:
            return forked
    process = subprocess.Popen(
        [environment.interpreter, str(_STUB), *map(str, fds), *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=variables,
        start_new_session=True,
    )
    return Child(process.pid, process.wait)


def _received(status: socket.socket) -> int | None:
    """The next number on a status socket; None when the other end is closed, or is silent for too long."""
    try:
        packet = status.recv(STATUS.size)
    except OSError:
        return None
    return int(STATUS.unpack(packet)[0]) if len(packet) == STATUS.size else None


def _wait_for_exit(pidfd: int, timeout_s: float | None) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll(None if timeout_s is None else timeout_s * 1000)
