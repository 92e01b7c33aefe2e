"""`StreamGuard`: creates the durable streams, checks their configuration, and recreates one that is deleted at run time.

Changes of a stream by other programs are neither accepted nor reverted: at the start they are an error that names the
field, later an error in the log. Only limits follow this gateway's options. A stream that is deleted is created again,
because producers go on publishing; its content is lost, so that is an error in the log, too.
Source: JetStream's advisories of streams (`$JS.EVENT.ADVISORY.STREAM.<action>.<stream>`), stream update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum
from typing import Any

from nats.js.api import StreamConfig
from nats.js.errors import APIError, ServerError

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus, Message
from weir.bus.streams.declarations import QueueLimits, durable_streams, ensure_durable_streams
from weir.runtime.containment import call_each, contained
from weir.schemas.core.errors import unavailable

logger = logging.getLogger("weir.bus")

_REQUIRED = (
    "subjects",
    "retention",
    "storage",
    "discard",
    "discard_new_per_subject",
    "allow_direct",
    "allow_atomic",
    "allow_msg_ttl",
)
_FORBIDDEN = ("no_ack", "sealed", "deny_delete", "deny_purge", "mirror", "sources", "subject_transform", "persist_mode")
_ALSO_REQUIRED = {
    # A maximum age would drop accepted requests without a record.
    subjects.QUEUE_STREAM: ("max_age",),
    # Otherwise more than one record of an id would be kept.
    subjects.RESULT_STREAM: ("max_msgs_per_subject",),
}
_LIMITS = {
    subjects.QUEUE_STREAM: ("max_msgs_per_subject", "max_bytes"),
    subjects.RESULT_STREAM: ("max_age", "max_bytes"),
    subjects.DEAD_STREAM: ("max_bytes",),
}
_RETRY_S = 1.0
_NO_ROOM = 10047  # JSStorageResourcesExceededErr


class StreamGuard:
    """Guards the durable streams for one gateway. Everything runs in one event loop."""

    def __init__(self, bus: Bus, limits: QueueLimits) -> None:
        self._bus = bus
        self._limits = limits
        self._wanted = {str(config.name): config for config in durable_streams(limits, bus.replicas)}
        self._listeners: list[Callable[[str], None]] = []
        self._gone_listeners: list[Callable[[str], None]] = []
        self._background: asyncio.TaskGroup | None = None
        self._is_restoring = False
        self._is_missing = False  # whether a stream is, perhaps deleted while another was recreated
        self._tasks: set[asyncio.Task[None]] = set()

    def on_recreated(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the name of a stream that was deleted and created again, without consumers."""
        self._listeners.append(listener)

    def on_gone(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the name of a stream that was deleted, with all its messages."""
        self._gone_listeners.append(listener)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Creates missing streams, applies the limits of the options, and watches the streams from now on.

        Raises WeirError (UNAVAILABLE) for an existing stream whose configuration Weir can't work with, and where the broker
        has no room for the streams.
        """
        self._background = background
        # The last one is looked up first: it is created last, so the others must have existed.
        names = list(self._wanted)
        existing = [name for name in reversed(names) if await self._config_of(name) is not None]
        try:
            made = await ensure_durable_streams(self._bus, self._limits)
        except ServerError as error:
            if error.err_code != _NO_ROOM:
                raise
            made = await self._ensure_in_less_room()
        for name in made:
            if existing and names.index(name) < names.index(existing[0]):
                why = f"stream {name} does not exist although {existing[0]} does"
                logger.error("%s: its content is lost, and it is created again", why)
        for name in names:
            await self._adopt(name)
        for action, listener in (("DELETED", self._on_deleted), ("UPDATED", self._on_updated)):
            for name in self._wanted:
                await self._bus.subscribe(f"$JS.EVENT.ADVISORY.STREAM.{action}.{name}", listener)
        self._bus.on_reconnect(self._restore)

    async def _adopt(self, name: str) -> None:
        """Checks the configuration of an existing stream, and applies the limits of the options. Raises WeirError."""
        wanted, found = self._wanted[name], await self._config_of(name) or {}
        problem = drift(wanted, found)
        if problem:
            raise unavailable(problem)
        await self._update_limits(name, wanted, found)

    async def _ensure_in_less_room(self) -> list[str]:
        """Creates the missing streams once the existing ones have the limits of the options: smaller ones make room."""
        for name in self._wanted:
            if await self._config_of(name) is not None:
                await self._adopt(name)
        try:
            return await ensure_durable_streams(self._bus, self._limits)
        except ServerError as error:
            if error.err_code != _NO_ROOM:
                raise
            problem = f"JetStream has no room for the durable streams: {error.description}"
            raise unavailable(f"{problem}. {self._sizes()}") from error

    def _sizes(self) -> str:
        limits = self._limits
        return (
            f"They reserve {limits.max_bytes} bytes (--queue-max-bytes), {limits.result_max_bytes} (--result-max-bytes) "
            f"and {limits.dead_max_bytes} (--dead-max-bytes): make these smaller, or `max_file_store` of nats-server larger"
        )

    def stop(self) -> None:
        """Recreates no stream from now on."""
        for task in self._tasks:
            task.cancel()

    async def _update_limits(self, name: str, wanted: StreamConfig, found: Mapping[str, Any]) -> None:
        limits = _comparable(wanted)
        kept_by = found.get("num_replicas", 1)
        followed = _LIMITS.get(name, ())
        if self._bus.access.replicas:
            followed = (*followed, "num_replicas")
        elif kept_by < limits["num_replicas"]:
            logger.warning(
                "stream %s has %s replicas in a cluster: set --nats-replicas=3 to change that", name, kept_by
            )
        problem = await self._change(name, found, {field: limits[field] for field in followed})
        if problem:
            raise unavailable(f"limits of stream {name} can't be changed {problem}. {self._sizes()}")

    async def _change(self, name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
        """Sets fields of a stream; returns those that JetStream rejected with its reason, "" if it accepted all."""
        changed = {field: value for field, value in wanted.items() if value != found.get(field)}
        if not changed:
            return ""
        config = {**found, **changed}
        if 0 < config["max_age"] < config.get("duplicate_window", 0):
            config["duplicate_window"] = config["max_age"]  # nats-server accepts no longer one
        change = ", ".join(f"{field} {found.get(field)} -> {value}" for field, value in changed.items())
        try:
            await self._bus.jetstream.ask(f"STREAM.UPDATE.{name}", config)
        except APIError as error:
            return f"({change}): {error.description}"
        logger.info("changed limits of stream %s: %s", name, change)
        return ""

    def _on_deleted(self, message: Message) -> None:
        self.recreate(message.subject.rsplit(".", 1)[1])

    def recreate(self, name: str) -> None:
        """Recreates a stream that does not exist, as an advisory or a caller has noticed: not every deletion has an
        advisory.
        """
        if self._is_restoring and self._is_missing:
            return
        logger.error("stream %s was deleted while it was in use: its content is lost, and it is created again", name)
        call_each("weir.bus.streams.guard: a listener for deleted streams", self._gone_listeners, name)
        self._is_missing = True
        if not self._is_restoring:
            self._is_restoring = True
            self._do(self._restore_soon())

    def _on_updated(self, message: Message) -> None:
        name = message.subject.rsplit(".", 1)[1]
        self._do(self._check(name))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._background is not None  # noqa: S101 - set by `start`
        task = self._background.create_task(self._contain(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contained()
    async def _contain(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    async def _restore_soon(self) -> None:
        try:
            while self._is_missing and self._bus.is_connected:  # else the next reconnection restores it
                self._is_missing = False
                try:
                    await self._restore(is_logged=True)
                except BROKER_ERRORS as error:
                    self._is_missing = True
                    logger.warning("streams are not created yet, trying again: %s: %s", type(error).__name__, error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            self._is_restoring = False

    async def _restore(self, is_logged: bool = False) -> None:
        """Creates missing streams, and logs changes of the others."""
        for name in await ensure_durable_streams(self._bus, self._limits):
            if not is_logged:
                logger.error("stream %s does not exist any more: its content is lost, and it is created again", name)
            call_each("weir.bus.streams.guard: a listener for recreated streams", self._listeners, name)
        for name in self._wanted:
            await self._check(name)

    async def _check(self, name: str) -> None:
        try:
            found = await self._config_of(name)
        except BROKER_ERRORS:
            return  # checked again after the reconnection
        problem = "" if found is None else drift(self._wanted[name], found)
        if problem:
            logger.error("%s", problem)

    async def _config_of(self, name: str) -> dict[str, Any] | None:
        info = await self._bus.jetstream.find_stream(name)
        return None if info is None else info["config"]


def drift(wanted: StreamConfig, found: Mapping[str, Any]) -> str:
    """How the configuration differs from what Weir needs, as a sentence; "" if it does not. `found` is JetStream's."""
    needed = _comparable(wanted)
    required = (*_REQUIRED, *_ALSO_REQUIRED.get(str(wanted.name), ()))
    for field in (*required, *_FORBIDDEN):
        value, is_needed = _value(found, field), None if field in _FORBIDDEN else _value(needed, field)
        if value != is_needed:
            return (
                f"stream {wanted.name} has {field} {_shown(value)} but Weir needs {_shown(is_needed)}: another program has "
                "created or changed it; change it back, or delete the stream with its content"
            )
    return ""


def _comparable(config: StreamConfig) -> dict[str, Any]:
    return {field: value.value if isinstance(value, Enum) else value for field, value in config.as_dict().items()}


def _value(config: Mapping[str, Any], field: str) -> Any:
    """The value of a field, None if it is off or missing: nats-server and nats-py leave out different zero values."""
    value = config.get(field)
    if isinstance(value, list):
        return sorted(map(str, value)) or None
    return None if value in (None, False, 0, -1, "", "default") else value


def _shown(value: Any) -> str:
    return "off" if value is None else "on" if value is True else repr(value)
