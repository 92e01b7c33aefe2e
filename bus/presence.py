"""Presence: which processes of which role are there, told by themselves.

Each tells about itself on `presence.<role>.<id>` in short intervals, when it is asked, and once more when it leaves.
Nothing of it is stored: who is not heard any more is not there. Who may do what is never decided by this alone, for a
process that is not heard may be paused, and go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bus import subjects
from bus.connection import Bus, Message
from bus.identity import host
from runtime import loop_lag
from runtime.containment import call_each, contained
from schemas.presence import Role, RoleRecord, pack_role, unpack_role
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

INTERVAL_S = 1.0
SILENCE_LIMIT_S = 5.0
"""A process that has not been heard for this long is taken for gone, where nobody asks for less."""

MAX_PROCESSES = 4096
"""Processes of one role that are listened to: their names come from messages alone."""


class Presence:
    """Tells of this process. `describe()` returns the fields of `RoleRecord` that change, as they are now."""

    def __init__(self, bus: Bus, role: Role, id: str, describe: Callable[[], dict[str, Any]] = dict) -> None:
        self._bus = bus
        self._describe = describe
        self._subject = subjects.presence(role, id)
        self._is_leaving = False
        self._about = RoleRecord(
            role=role,
            id=id,
            host=host(),
            host_name=socket.gethostname(),
            pid=os.getpid(),
            version=_release(),
            since_ms=time.time_ns() // 1_000_000,
        )

    async def start(self, background: asyncio.TaskGroup, interval_s: float = INTERVAL_S) -> asyncio.Task[None]:
        """Tells from now on, in a task of `background`, which it returns."""
        await self._bus.subscribe(subjects.PRESENCE_QUERY, lambda message: self.tell())
        self.tell()
        return background.create_task(self._go_on(interval_s))

    @contained()
    def tell(self, leaving: bool = False) -> None:
        """Tells now; with `leaving` that it ends its work, as it then says to all who ask, for as long as that takes."""
        self._is_leaving = self._is_leaving or leaving
        changing = {"loop_lag_s": loop_lag.ROLE.max_s(), "leaving": self._is_leaving}
        record = self._about.model_copy(update={**self._describe(), **changing})
        self._bus.publish(self._subject, pack_role(record))

    async def _go_on(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            # What would be kept for a broker that comes back tells nothing then.
            if self._bus.is_connected:
                self.tell()


class PresenceView:
    """The processes that are heard, of all roles or of one. Listeners are called with (record, whether it is there)."""

    def __init__(self, bus: Bus, role: Role | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._subject = subjects.presence(role, "*") if role else subjects.PRESENCE
        self._clock = clock
        self._listeners: list[Callable[[RoleRecord, bool], None]] = []
        self._heard_s: dict[str, float] = {}
        self.processes: dict[str, RoleRecord] = {}
        self.malformed = 0

    def on_change(self, listener: Callable[[RoleRecord, bool], None]) -> None:
        """`listener(record, is_there)` after a process has come, changed what it tells, left, or fallen silent."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Listens, and asks who is there, now and whenever the broker has come back."""
        await self._bus.subscribe(self._subject, self._on_message)
        self._bus.on_reconnect(self._ask)
        await self._ask()

    def heard_s(self, id: str) -> float:
        """When the process was heard last, by the clock of this view."""
        return self._heard_s[id]

    def drop(self, id: str) -> None:
        """Forgets a process that is known to be gone."""
        record = self.processes.pop(id, None)
        self._heard_s.pop(id, None)
        if record is not None:
            self._tell(record, False)

    def expire(self, limit_s: float = SILENCE_LIMIT_S) -> list[str]:
        """Forgets those that were not heard for `limit_s`; returns their ids. Called now and then."""
        limit = self._clock() - limit_s
        silent = [id for id, heard_s in self._heard_s.items() if heard_s < limit]
        for id in silent:
            self.drop(id)
        return silent

    def hear_all(self) -> None:
        """Nobody could be heard for a while: all have as long again to tell of themselves."""
        now = self._clock()
        for id in self._heard_s:
            self._heard_s[id] = now

    async def _ask(self) -> None:
        self.hear_all()
        self._bus.publish(subjects.PRESENCE_QUERY, b"")

    def _on_message(self, message: Message) -> None:
        try:
            record = unpack_role(message.data)
        except MalformedMessage as error:
            self.malformed += 1
            logger.warning("subject %s: %s", message.subject, error)
            return
        if message.subject != subjects.presence(record.role, record.id):
            self.malformed += 1
            return
        if record.leaving:
            self.drop(record.id)
            return
        known = self.processes.get(record.id)
        if known is None and len(self.processes) >= MAX_PROCESSES:
            self.malformed += 1
            return
        self._heard_s[record.id] = self._clock()
        self.processes[record.id] = record
        if record.differs_from(known):
            self._tell(record, True)

    def _tell(self, record: RoleRecord, is_there: bool) -> None:
        call_each("bus.presence: a listener", self._listeners, record, is_there)


def _release() -> str:
    try:
        return version("weir")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return ""
