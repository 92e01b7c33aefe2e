"""Forks processes that have imported everything a model's process needs, except the model.

The fork server is a process of the worker's interpreter without user code and with one thread. The worker sends it, on a
socket of packets, what a process is started with (JSON: its arguments, variables, working folder and CPUs), and the files
that it gets: a status socket, standard output and error, and those of the stub. On the status socket come the id of the new
process and, when it has ended, how. Its id stays taken until the worker closes that socket, so the worker may send signals.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

import numpy as np

STATUS = struct.Struct("<i")
"""The id of the new process, or a negative error number; later its exit status, or the negative number of a signal."""

MAX_REQUEST_BYTES = 128 * 1024
"""The longest request; the worker starts a process with a longer one itself."""

MAX_FDS = 32
"""Files that one request may carry."""

ARGUMENT = "fork-server"
"""The first argument of the stub that makes it a fork server; the second is the number of the control socket."""

_PR_SET_PDEATHSIG = 1


class _Child:
    """A forked process, and the status socket that belongs to it."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.status = status
        self.pidfd = os.pidfd_open(pid)
        self.has_ended = False
        self.is_released = False


class ForkServer:
    """Serves one worker on `control`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._children: dict[int, _Child] = {}  # by pidfd, and by the descriptor of the status socket

    def serve(self) -> list[str] | None:
        """Returns the arguments of the stub in each forked process, and None here when the worker has ended."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        gc.collect()
        gc.freeze()  # what is imported stays in pages that all processes share
        self._control.send(STATUS.pack(len(os.listdir("/proc/self/task"))))
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor != self._control.fileno():
                    self._follow(descriptor)
                    continue
                request, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, MAX_FDS)
                if not request:
                    return None
                arguments = self._fork(request, fds)
                if arguments is not None:
                    return arguments

    def _fork(self, request: bytes, fds: list[int]) -> list[str] | None:
        """Returns the stub's arguments in the new process, None in this one."""
        status = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError as error:
            status.send(STATUS.pack(-(error.errno or errno.EAGAIN)))
            pid = -1
        if pid == 0:
            self._close()
            return _prepare(json.loads(request), status, *fds[1:])
        for fd in fds[1:]:
            os.close(fd)
        if pid > 0:
            child = _Child(pid, status)
            for descriptor in (child.pidfd, status.fileno()):
                self._children[descriptor] = child
                self._poller.register(descriptor, select.POLLIN)
        return None

    def _follow(self, descriptor: int) -> None:
        """Handles that a process has ended, or that the worker does not need its id any more."""
        child = self._children.pop(descriptor, None)
        if child is None:
            return
        self._poller.unregister(descriptor)
        if descriptor == child.pidfd:
            child.has_ended = True
            os.close(child.pidfd)
            if not child.is_released:
                _report_end(child)
        else:
            child.is_released = True
            if not child.has_ended:
                _kill_group(child.pid)
        if child.has_ended and child.is_released:
            os.waitpid(child.pid, 0)
            child.status.close()  # the worker waits for this

    def _close(self) -> None:
        """Closes the server's descriptors in a forked process."""
        self._control.close()
        for descriptor, child in self._children.items():
            if descriptor == child.pidfd:
                os.close(descriptor)
            else:
                child.status.close()


def _report_end(child: _Child) -> None:
    ending = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    if ending is None:
        return
    status = ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status
    try:
        child.status.send(STATUS.pack(status))
    except OSError:
        pass  # the worker has closed its end, or has ended


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended


def _prepare(request: dict[str, Any], status: socket.socket, output: int, errors: int, *fds: int) -> list[str]:
    """Makes a forked process what a process that the worker starts itself would be; returns the stub's arguments."""
    os.setsid()
    for standard, fd in ((1, output), (2, errors)):
        os.dup2(fd, standard)
        os.close(fd)
    variables: dict[str, str] = request["variables"]
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cpus"])
    # Numpy seeds its generator when it is imported; the standard library's seeds itself after a fork.
    if "numpy.random" in sys.modules:
        np.random.seed()
    with status:
        status.send(STATUS.pack(os.getpid()))
    return [*map(str, fds), *request["arguments"]]
