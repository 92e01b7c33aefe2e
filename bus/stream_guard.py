"""`StreamGuard`: sees to it that the durable streams are there, and are what Weir relies on, while a gateway runs.

What somebody else has changed is never taken as it is, nor changed back unasked: at the start it is an error that names
the field, later one in the log. Only limits follow our options. A stream that is deleted under us is made anew, because
producers go on publishing; what it held is gone, so that is an error in the log, too.
Source: JetStream's advisories of streams (`$JS.EVENT.ADVISORY.STREAM.<action>.<stream>`), stream update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum
from typing import Any

from nats.errors import Error as NatsError
from nats.js.api import StreamConfig

from bus import durable_subjects as subjects
from bus.connection import Bus, Message
from bus.durable_streams import QueueLimits, durable_streams, ensure_durable_streams
from runtime.containment import call_each, contained
from schemas.errors import unavailable

logger = logging.getLogger("weir.bus")

_RELIED_ON = (
    "subjects",
    "retention",
    "storage",
    "discard",
    "discard_new_per_subject",
    "allow_direct",
    "allow_atomic",
    "allow_msg_ttl",
)
_NEVER = ("no_ack", "sealed", "deny_delete", "deny_purge", "mirror", "sources", "subject_transform", "persist_mode")
_ALSO_RELIED_ON = {
    # An age would drop requests that were accepted, without a record of it.
    subjects.QUEUE_STREAM: ("max_age",),
    # More than one record of an id would be kept.
    subjects.RESULT_STREAM: ("max_msgs_per_subject",),
}
_LIMITS = {
    subjects.QUEUE_STREAM: ("max_msgs_per_subject", "max_bytes"),
    subjects.RESULT_STREAM: ("max_age", "max_bytes"),
}
_RETRY_S = 1.0


class StreamGuard:
    """See the module. One of a gateway; everything runs in one event loop."""

    def __init__(self, bus: Bus, limits: QueueLimits) -> None:
        self._bus = bus
        self._limits = limits
        self._wanted = {str(config.name): config for config in durable_streams(limits, bus.replicas)}
        self._listeners: list[Callable[[str], None]] = []
        self._gone_listeners: list[Callable[[str], None]] = []
        self._background: asyncio.TaskGroup | None = None
        self._is_restoring = False
        self._is_missing = False  # a stream, which may have been deleted while another was made anew
        self._tasks: set[asyncio.Task[None]] = set()

    def on_made_anew(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the name of a stream that was gone and is there again, without consumers."""
        self._listeners.append(listener)

    def on_gone(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the name of a stream that was deleted: what is known of its messages is void."""
        self._gone_listeners.append(listener)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Makes what is missing, has limits follow our options, and watches from now on.

        Raises WeirError (UNAVAILABLE) where a stream is there that is not what we rely on.
        """
        self._background = background
        # The last is looked up first: who makes them makes it last, so that the others must have been there.
        names = list(self._wanted)
        there = [name for name in reversed(names) if await self._config_of(name) is not None]
        for name in await ensure_durable_streams(self._bus, self._limits):
            if there and names.index(name) < names.index(there[0]):
                why = f"stream {name} was not there though {there[0]} was"
                logger.error("%s: what it held is gone, and it is made anew", why)
        for name, wanted in self._wanted.items():
            found = await self._config_of(name) or {}
            problem = drift(wanted, found)
            if problem:
                raise unavailable(problem)
            await self._update_limits(name, wanted, found)
        for action, listener in (("DELETED", self._on_deleted), ("UPDATED", self._on_updated)):
            for name in self._wanted:
                await self._bus.subscribe(f"$JS.EVENT.ADVISORY.STREAM.{action}.{name}", listener)
        self._bus.on_reconnect(self._restore)

    def stop(self) -> None:
        """Makes nothing anew any more."""
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
                "stream %s is kept by %s of the cluster's servers: --nats-replicas=3 changes that", name, kept_by
            )
        problem = await self._change(name, found, {field: limits[field] for field in followed})
        if problem:
            raise unavailable(f"limits of stream {name} can't be changed {problem}")
        if name == subjects.QUEUE_STREAM:
            # Those of earlier versions don't say how many consumers they may have. Servers before 2.15, which take no such
            # change, don't ask.
            problem = await self._change(
                name, await self._config_of(name) or {}, {"max_consumers": limits["max_consumers"]}
            )
            if problem:
                logger.info("stream %s keeps to as many consumers as it has room for: %s", name, problem)

    async def _change(self, name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
        """Has fields of a stream be as wanted; what was not taken, and why, "" where it was."""
        changed = {field: value for field, value in wanted.items() if value != found.get(field)}
        if not changed:
            return ""
        config = {**found, **changed}
        if 0 < config["max_age"] < config.get("duplicate_window", 0):
            config["duplicate_window"] = config["max_age"]  # nats-server takes no longer one
        answer = await self._bus.ask(f"$JS.API.STREAM.UPDATE.{name}", config)
        told = ", ".join(f"{field} {found.get(field)} -> {value}" for field, value in changed.items())
        if isinstance(error := answer.get("error"), dict):
            return f"({told}): {error.get('description')}"
        logger.info("changed limits of stream %s: %s", name, told)
        return ""

    def _on_deleted(self, message: Message) -> None:
        self.gone(message.subject.rsplit(".", 1)[1])

    def gone(self, name: str) -> None:
        """A stream is not there, as an advisory says or whoever asked for it: not every deletion is told by an advisory."""
        if self._is_restoring and self._is_missing:
            return
        logger.error("stream %s was deleted while it was in use: what it held is gone, and it is made anew", name)
        call_each("bus.stream_guard: a listener for deleted streams", self._gone_listeners, name)
        self._is_missing = True
        if not self._is_restoring:
            self._is_restoring = True
            self._do(self._restore_soon())

    def _on_updated(self, message: Message) -> None:
        name = message.subject.rsplit(".", 1)[1]
        self._do(self._look_at(name))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._background is not None  # noqa: S101 - nothing is heard before the start
        task = self._background.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contained()
    async def _restore_soon(self) -> None:
        try:
            while self._is_missing and self._bus.is_connected:  # else the reconnection sees to it
                self._is_missing = False
                try:
                    await self._restore(is_told=True)
                except (NatsError, OSError, TimeoutError) as error:
                    self._is_missing = True
                    logger.warning("streams not made anew yet: %s: %s", type(error).__name__, error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            self._is_restoring = False

    async def _restore(self, is_told: bool = False) -> None:
        """Makes anew what is gone; what is no longer as it was is told."""
        for name in await ensure_durable_streams(self._bus, self._limits):
            if not is_told:
                logger.error("stream %s is gone, and what it held: it is made anew", name)
            call_each("bus.stream_guard: a listener for recreated streams", self._listeners, name)
        for name in self._wanted:
            await self._look_at(name)

    @contained()
    async def _look_at(self, name: str) -> None:
        try:
            found = await self._config_of(name)
        except (NatsError, OSError, TimeoutError):
            return  # the broker is away: looked at again when it is back
        problem = "" if found is None else drift(self._wanted[name], found)
        if problem:
            logger.error("%s", problem)

    async def _config_of(self, name: str) -> dict[str, Any] | None:
        answer = await self._bus.ask(f"$JS.API.STREAM.INFO.{name}")
        config = answer.get("config")
        return config if isinstance(config, dict) else None


def drift(wanted: StreamConfig, found: Mapping[str, Any]) -> str:
    """In what the stream is not what we rely on, as a sentence; "" where it is. `found` is JetStream's configuration."""
    needed = _comparable(wanted)
    relied_on = (*_RELIED_ON, *_ALSO_RELIED_ON.get(str(wanted.name), ()))
    for field in (*relied_on, *_NEVER):
        value, is_needed = _value(found, field), None if field in _NEVER else _value(needed, field)
        if value != is_needed:
            return (
                f"stream {wanted.name} has {field} {_told(value)} where Weir needs {_told(is_needed)}: somebody else has "
                "made or changed it; change it back, or remove it with all that it holds"
            )
    return ""


def _comparable(config: StreamConfig) -> dict[str, Any]:
    return {field: value.value if isinstance(value, Enum) else value for field, value in config.as_dict().items()}


def _value(config: Mapping[str, Any], field: str) -> Any:
    """The field's value, None where it is off or left out: nats-server leaves out some of what is zero, nats-py other."""
    value = config.get(field)
    if isinstance(value, list):
        return sorted(map(str, value)) or None
    return None if value in (None, False, 0, -1, "", "default") else value


def _told(value: Any) -> str:
    return "off" if value is None else "on" if value is True else repr(value)
