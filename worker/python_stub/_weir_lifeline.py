"""What ties the process of a model to its worker, and answers the worker while the model is busy: is it ready?

The kernel's parent-death signal works even while a model holds the interpreter lock; the lifeline, a socket only the
worker holds the other end of, covers a worker that died before that was asked for. The same socket brings questions, each a
number, which a thread of their own answers: `execute` may be running, and the lifeline must be watched, meanwhile.
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

QUESTION = struct.Struct("<I")
"""Asks whether the model is ready: the number of the question. Packets keep messages apart."""

ANSWER = struct.Struct("<I?")
"""The number of the question, and whether the model is ready."""

_PR_SET_PDEATHSIG = 1


class Lifeline:
    """See the module. The process ends when the worker does, however that ended.

    `is_ready` is asked in another thread than the model's; it is called until it has answered, one question at a time.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._is_ready: Callable[[], bool] | None = None
        self._questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def answer_by(self, is_ready: Callable[[], bool]) -> None:
        """Questions are answered by `is_ready()` from now on, which must not raise."""
        if self._is_ready is None:
            threading.Thread(target=self._answer, name="readiness", daemon=True).start()
        self._is_ready = is_ready

    def close_after_fork(self) -> None:
        """A process the model forks must not keep this end open."""
        self._end.close()

    def _watch(self) -> None:
        while True:
            try:
                question = self._end.recv(QUESTION.size)
            except OSError:
                question = b""
            if not question:
                os._exit(1)
            self._questions.put(question)

    def _answer(self) -> None:
        while True:
            questions = [self._questions.get()]
            is_ready = self._is_ready is not None and self._is_ready()
            # The worker has given the first one up where others have come meanwhile: a model that takes longer than
            # it may is as ready for those as it says now. Asking it anew each time, it would never be ready.
            while not self._questions.empty():
                questions.append(self._questions.get())
            try:
                for question in questions:
                    self._end.send(ANSWER.pack(*QUESTION.unpack(question), is_ready))
            except OSError:
                return  # the worker is gone, which the other thread sees too
