"""Ends the process of a model with its worker, and replies to the worker's readiness probes while the model is busy.

The kernel's parent-death signal works even while a model holds the interpreter lock. A worker that died before the process
asked the kernel for it is detected by a socket of which only the worker holds the other end. The same socket carries
probes, each a number, to which a separate thread replies: `execute` may be running, and the socket must be watched,
meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import struct
import threading
from collections.abc import Callable

PROBE_REQUEST = struct.Struct("<I")
"""Asks whether the model is ready: the number of the probe. Each message is one packet."""

PROBE_REPLY = struct.Struct("<I?")
"""The number of the probe, and whether the model is ready."""

_PR_SET_PDEATHSIG = 1


class ParentWatch:
    """Ends this process when the worker ends, however that happens, and replies to readiness probes.

    `end` is this process's end of the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._is_ready: Callable[[], bool] | None = None
        self._probes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=self._watch, name="parent watch", daemon=True).start()

    def reply_with(self, is_ready: Callable[[], bool]) -> None:
        """Replies to probes with `is_ready()` from now on, called in a separate thread, once at a time.

        It must not raise.
        """
        if self._is_ready is None:
            threading.Thread(target=self._reply, name="readiness", daemon=True).start()
        self._is_ready = is_ready

    def close_after_fork(self) -> None:
        """Closes this end in a process that the model has forked."""
        self._end.close()

    def _watch(self) -> None:
        while True:
            try:
                probe = self._end.recv(PROBE_REQUEST.size)
            except OSError:
                probe = b""
            if not probe:
                os._exit(1)
            self._probes.put(probe)

    def _reply(self) -> None:
        while True:
            probes = [self._probes.get()]
            is_ready = self._is_ready is not None and self._is_ready()
            # Probes that arrived meanwhile get the same reply. The worker sends another once the previous one timed out:
            # if each called `is_ready` again, a model that takes longer than the timeout would never be ready.
            while not self._probes.empty():
                probes.append(self._probes.get())
            try:
                for probe in probes:
                    self._end.send(PROBE_REPLY.pack(*PROBE_REQUEST.unpack(probe), is_ready))
            except OSError:
                return  # the worker has ended, which the other thread detects
