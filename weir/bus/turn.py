"""`Turn`: what a process does at the end of a turn of its event loop, once for nats-server's connection and all links.

Messages that are published in one turn leave in one write of each connection, and what callbacks of several messages have
in common is done once, after all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from weir.runtime.containment import call_each, report

_DISPATCHING = "weir.bus.turn: dispatching messages"
_DEFERRED = "weir.bus.turn: running a deferred callback"
_WRITING = "weir.bus.turn: writing the messages of a turn"


class Turn:
    """The callbacks of one process that run when all messages that have arrived are dispatched, or when a turn ends."""

    def __init__(self) -> None:
        self._deferred: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._writes: list[Callable[[], None]] = []
        self._is_dispatching = False
        self._end_is_due = False

    def run(self, dispatch: Callable[..., None], *arguments: Any) -> None:
        """Calls `dispatch`, which passes messages of a connection to their callbacks; then what those have deferred.

        What all of them publish leaves in one write after that. Never raises.
        """
        if self._is_dispatching:
            dispatch(*arguments)
            return
        self._is_dispatching = True
        try:
            dispatch(*arguments)
        except Exception as error:  # noqa: BLE001 - contained: other connections and later messages are not affected
            report(_DISPATCHING, error)
        try:
            while self._deferred:
                deferred, self._deferred = self._deferred, []
                call_each(_DEFERRED, deferred)
        finally:
            self._is_dispatching = False
        if self._writes:
            writes, self._writes = self._writes, []
            call_each(_WRITING, writes)

    def defer(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when all messages that have arrived are dispatched, before messages of theirs are written."""
        if self._is_dispatching:
            self._deferred.append(callback)
        else:
            self.at_end(callback)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at the end of this turn of the loop, after the messages of all connections.

        Messages that it publishes leave in one write, without another turn.
        """
        self._at_end.append(callback)
        if not self._end_is_due:
            self._schedule()

    def at_write(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the messages of this turn are to be written."""
        self._writes.append(callback)
        if not self._is_dispatching and not self._end_is_due:
            self._schedule()

    def _schedule(self) -> None:
        self._end_is_due = True
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._end_is_due = False
        at_end, self._at_end = self._at_end, []
        self.run(call_each, _DEFERRED, at_end)
