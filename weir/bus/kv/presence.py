"""`Presence` publishes a record of this process; `PresenceView` collects the records of all processes.

Each process publishes its record on `presence.<role>.<id>` periodically, on a query, and when it leaves. Records are not
stored: a process without a recent one counts as gone. Ownership is never decided by this alone, because a silent process
may be paused, and continue.
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

from msgspec.structs import replace

from weir.bus.naming import subjects
from weir.bus.naming.identity import host
from weir.bus.nats.connection import Bus, Message
from weir.runtime import loop_lag
from weir.runtime.containment import call_each, contained
from weir.runtime.ticks import next_tick
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.registry import Role, RoleRecord

logger = logging.getLogger("weir.bus")

INTERVAL_S = 1.0
SILENCE_LIMIT_S = 5.0
"""A process that has published nothing for this long is considered gone, unless the caller says otherwise."""

MAX_PROCESSES = 4096
"""Processes of one role that are recorded: anybody on the bus can name some."""


class Presence:
    """Publishes the record of this process. `describe()` returns the current values of the fields that change."""

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
            version=own_release(),
            since_ms=time.time_ns() // 1_000_000,
        )

    async def start(self, background: asyncio.TaskGroup, interval_s: float = INTERVAL_S) -> asyncio.Task[None]:
        """Publishes from now on, in a task of `background`, which it returns."""
        await self._bus.subscribe(subjects.PRESENCE_QUERY, lambda message: self.publish())
        self.publish()
        return background.create_task(self._repeat(interval_s))

    @contained()
    def publish(self, leaving: bool = False) -> None:
        """Publishes the record now; with `leaving` this and all later records say that the process is shutting down."""
        self._is_leaving = self._is_leaving or leaving
        changing = {"loop_lag_s": loop_lag.ROLE.max_s(), "leaving": self._is_leaving}
        record = replace(self._about, **self._describe(), **changing)
        self._bus.publish(self._subject, record.pack())

    async def _repeat(self, interval_s: float) -> None:
        while True:
            await next_tick(interval_s)
            if self._bus.is_connected:
                self.publish()


class PresenceView:
    """The live processes, of all roles or of one. Listeners are called with (record, whether it is live)."""

    def __init__(self, bus: Bus, role: Role | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._subject = subjects.presence(role, "*") if role else subjects.PRESENCE
        self._clock = clock
        self._listeners: list[Callable[[RoleRecord, bool], None]] = []
        self._heard_s: dict[str, float] = {}
        self.processes: dict[str, RoleRecord] = {}
        self.malformed = 0

    def on_change(self, listener: Callable[[RoleRecord, bool], None]) -> None:
        """`listener(record, is_live)` after a process has started, changed its record, left, or fallen silent."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Subscribes to records, and queries all processes, now and after each reconnection."""
        await self._bus.subscribe(self._subject, self._on_message)
        self._bus.on_reconnect(self._query)
        await self._query()

    def heard_s(self, id: str) -> float:
        """When the last record of the process arrived, by the clock of this view."""
        return self._heard_s[id]

    def drop(self, id: str) -> None:
        """Removes a process that is known to be gone."""
        record = self.processes.pop(id, None)
        self._heard_s.pop(id, None)
        if record is not None:
            self._notify(record, False)

    def expire(self, limit_s: float = SILENCE_LIMIT_S) -> list[str]:
        """Removes processes without a record for `limit_s`; returns their ids. Called periodically."""
        limit = self._clock() - limit_s
        silent = [id for id, heard_s in self._heard_s.items() if heard_s < limit]
        for id in silent:
            self.drop(id)
        return silent

    def restart_timeouts(self) -> None:
        """Treats all records as new, because none could arrive for a while."""
        now = self._clock()
        for id in self._heard_s:
            self._heard_s[id] = now

    async def _query(self) -> None:
        self.restart_timeouts()
        self._bus.publish(subjects.PRESENCE_QUERY, b"")

    def _on_message(self, message: Message) -> None:
        try:
            record = RoleRecord.unpack(message.data)
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
            self._notify(record, True)

    def _notify(self, record: RoleRecord, is_live: bool) -> None:
        call_each("weir.bus.kv.presence: a listener", self._listeners, record, is_live)


def own_release() -> str:
    """The installed release of Weir; "" where it runs from a source tree without metadata."""
    try:
        return version("weir-serve")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return ""
