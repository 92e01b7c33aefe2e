"""`SharedSettings`: settings that clients change while the server runs, and that all roles follow.

They lie in bucket `settings`, in memory: key `logging` for the log, `trace` for the global trace setting and
`trace.<model>` for a model's own. Whoever takes a change writes it; everybody listens to the bucket's writes, and reads
it when it starts or the broker came back. A broker that came back without its memory gets the settings from whoever is
first to notice. Where two change the same key at once, the later write holds, for everybody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError, NotFoundError

from bus import subjects
from bus.connection import Bus, Message
from bus.streams import ensure_streams
from schemas.errors import unavailable

logger = logging.getLogger("weir.bus")

LOGGING, TRACE = "logging", "trace"
KINDS = (LOGGING, TRACE)
"""The kinds of settings."""

MAX_SETTING_BYTES = 4096
"""What may lie under one key."""

MAX_KEYS = 10_000
"""Keys that are followed."""

Apply = Callable[[str, bytes], None]
"""Takes the settings of a model ("": the ones that are nobody's own), or b"" where there are none any more.

Raises ValueError for bytes that are no settings.
"""


class SharedSettings:
    """One role's view of the bucket: it keeps all of it, for a broker that forgets, and follows what concerns it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._follow: dict[str, Apply] = {}
        self._values: dict[str, bytes] = {}
        self.malformed = 0

    def follow(self, kind: str, apply: Apply) -> None:
        """Has `apply` called with the settings of this kind, in the event loop, whenever they may have changed."""
        self._follow[kind] = apply

    async def start(self) -> None:
        """Listens, then reads what was written before."""
        await self._bus.subscribe(subjects.SETTINGS_WRITES, self._on_write)
        await self._bus.flush()
        await self._read_all()
        self._bus.on_reconnect(self._recover)

    async def write(self, kind: str, model: str, value: bytes) -> None:
        """Changes settings here, at once, and everywhere else, in a moment. Raises WeirError without a broker."""
        key = subjects.settings_key(kind, model)
        try:
            bucket = await self._bus.jetstream.key_value(subjects.SETTINGS_BUCKET)
            await bucket.put(key, value)
        except (NatsError, NotFoundError, OSError, TimeoutError) as error:
            logger.warning("settings could not be written: %s: %s", type(error).__name__, error)
            raise unavailable("the message broker is not available") from error
        self._take(key, value)

    async def _recover(self) -> None:
        await ensure_streams(self._bus)
        bucket = await self._bus.jetstream.key_value(subjects.SETTINGS_BUCKET)
        for key, value in list(self._values.items()):
            try:
                await bucket.create(key, value)
            except KeyWrongLastSequenceError:
                continue  # it is still there, or somebody was quicker
        await self._read_all()

    async def _read_all(self) -> None:
        bucket = await self._bus.jetstream.key_value(subjects.SETTINGS_BUCKET)
        try:
            keys = await bucket.keys()
        except (NoKeysError, NotFoundError):
            return
        for key in keys:
            try:
                entry = await bucket.get(key)
            except KeyNotFoundError:
                continue
            self._take(key, entry.value or b"")

    def _on_write(self, message: Message) -> None:
        self._take(message.subject.removeprefix(subjects.settings_subject("")), message.data)

    def _take(self, key: str, value: bytes) -> None:
        kind, model = subjects.parse_settings_key(key)
        if kind not in KINDS or self._values.get(key, b"") == value:
            return
        try:
            if len(value) > MAX_SETTING_BYTES or (key not in self._values and len(self._values) >= MAX_KEYS):
                raise ValueError("there is too much of it")
            if kind in self._follow:
                self._follow[kind](model, value)
        except ValueError as error:
            self.malformed += 1
            logger.warning("dropped settings %r: %s", key, error)
            return
        if value:
            self._values[key] = value
        else:
            self._values.pop(key, None)


class RoleLog(Protocol):
    """A log whose settings can be changed (`telemetry.logs.RoleLog`)."""

    def take(self, _model: str, data: bytes) -> None:
        """See `Apply`."""


async def follow_log(bus: Bus, log: RoleLog) -> None:
    """Has a role's log follow the log settings: all that a role without doors follows."""
    settings = SharedSettings(bus)
    settings.follow(LOGGING, log.take)
    await settings.start()
