"""`StepGates`: how many requests of an ensemble each of its steps may have under way (`max_inflight_requests`).

Source: Triton's ensembles. The limit is each step's own, shared by all requests of the ensemble. What is beyond it waits
in order, for `PATIENCE_S` at most: then it goes on all the same, so that steps never wait for each other for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

PATIENCE_S = 300.0


class _Waiting:
    __slots__ = ("call", "start", "timer")

    def __init__(self, call: Hashable, start: Callable[[], None]) -> None:
        self.call = call
        self.start = start
        self.timer: asyncio.TimerHandle | None = None


class StepGates:
    """The steps of one ensemble on one worker; `limit` 0 is none, and costs nothing."""

    def __init__(self, steps: int, limit: int, patience_s: float = PATIENCE_S) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._inside: list[set[Hashable]] = [set() for _ in range(steps)]
        self._waiting: list[deque[_Waiting]] = [deque() for _ in range(steps)]

    def enter(self, step: int, call: Hashable, start: Callable[[], None]) -> None:
        """Calls `start` now, or when the step has room for `call`."""
        if not self._limit:
            start()
        elif len(self._inside[step]) < self._limit:
            self._inside[step].add(call)
            start()
        else:
            waiting = _Waiting(call, start)
            waiting.timer = asyncio.get_running_loop().call_later(self._patience_s, self._go_on, step, waiting)
            self._waiting[step].append(waiting)

    def leave(self, step: int, call: Hashable) -> None:
        """The call has ended, or waits no longer; nothing happens where it had left before."""
        if not self._limit:
            return
        if call in self._inside[step]:
            self._inside[step].remove(call)
        else:
            for waiting in self._waiting[step]:
                if waiting.call is call:
                    self._waiting[step].remove(waiting)
                    _stop(waiting)
                    break
        while self._waiting[step] and len(self._inside[step]) < self._limit:
            self._let_in(step, self._waiting[step].popleft())

    def _go_on(self, step: int, waiting: _Waiting) -> None:
        if waiting in self._waiting[step]:
            self._waiting[step].remove(waiting)
            self._let_in(step, waiting)

    def _let_in(self, step: int, waiting: _Waiting) -> None:
        _stop(waiting)
        self._inside[step].add(waiting.call)
        waiting.start()


def _stop(waiting: _Waiting) -> None:
    if waiting.timer is not None:
        waiting.timer.cancel()
