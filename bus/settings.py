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
from nats.js.errors import KeyWrongLastSequenceError, NotFoundError

from bus import subjects
from bus.connection import Bus
from bus.kv_view import KvView
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
        self._view = KvView(bus, subjects.SETTINGS_BUCKET, self._take, lambda key: self._take(key, b""))
        self._follow: dict[str, Apply] = {}
        self._values: dict[str, bytes] = {}
        self.malformed = 0

    def follow(self, kind: str, apply: Apply) -> None:
        """Has `apply` called with the settings of this kind, in the event loop, whenever they may have changed."""
        self._follow[kind] = apply

    async def start(self) -> None:
        """Listens, then reads what was written before."""
        await self._view.listen()
        await self._bus.flush()
        await self._view.read()
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
        present = await self._view.read()
        bucket = await self._bus.jetstream.key_value(subjects.SETTINGS_BUCKET)
        for key, value in list(self._values.items()):
            if key not in present:
                try:
                    await bucket.create(key, value)
                except KeyWrongLastSequenceError:
                    continue  # another gateway has written the key first

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
