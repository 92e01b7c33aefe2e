"""`SharedSettings`: settings that clients change at run time, and that all roles apply.

They are in bucket `settings`, in memory: key `logging` for the log, `trace` for the global trace setting and
`trace.<model>` for the one of a model. The gateway that receives a change writes it; all roles follow the bucket. If the
broker has lost the bucket, the first role to reconnect writes the settings again. Of two concurrent changes to a key the
later one applies everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from nats.errors import Error as NatsError

from weir.bus.kv.view import KvView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import ensure_streams
from weir.schemas.core.errors import unavailable

logger = logging.getLogger("weir.bus")

LOGGING, TRACE = "logging", "trace"
KINDS = (LOGGING, TRACE)
"""The kinds of settings."""

MAX_SETTING_BYTES = 4096
"""The most that the settings of one key may take."""

MAX_KEYS = 10_000
"""Keys that are applied; settings of more keys are dropped."""

Apply = Callable[[str, bytes], None]
"""Applies the settings of a model ("": the global ones), or b"" after they were removed. Raises ValueError if malformed."""


class SharedSettings:
    """One role's view of the bucket. It keeps all settings, to restore a lost bucket, and applies those of followed
    kinds.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._view = KvView(bus, subjects.SETTINGS_BUCKET, self._take, lambda key: self._take(key, b""))
        self._follow: dict[str, Apply] = {}
        self._values: dict[str, bytes] = {}
        self.malformed = 0

    def follow(self, kind: str, apply: Apply) -> None:
        """Calls `apply` with the settings of this kind, in the event loop, whenever they may have changed."""
        self._follow[kind] = apply

    async def start(self) -> None:
        """Applies the current settings, and follows changes from now on."""
        await self._view.start()
        self._bus.on_reconnect(self._recover)

    async def write(self, kind: str, model: str, value: bytes) -> None:
        """Writes and applies settings; other roles apply them when the write reaches them. Raises WeirError without a
        broker.
        """
        key = subjects.settings_key(kind, model)
        try:
            await self._view.bucket.put(key, value)
        except (NatsError, OSError, TimeoutError) as error:
            logger.warning("settings could not be written to the broker: %s: %s", type(error).__name__, error)
            raise unavailable("the message broker is not available") from error
        self._take(key, value)

    async def _recover(self) -> None:
        await ensure_streams(self._bus)
        await self._view.read(lambda: dict(self._values))

    def _take(self, key: str, value: bytes) -> None:
        kind, model = subjects.parse_settings_key(key)
        if kind not in KINDS or self._values.get(key, b"") == value:
            return
        try:
            if len(value) > MAX_SETTING_BYTES or (key not in self._values and len(self._values) >= MAX_KEYS):
                raise ValueError(f"larger than {MAX_SETTING_BYTES} bytes, or more than {MAX_KEYS} keys")
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
    """A log with settings (`weir.telemetry.logs.RoleLog`)."""

    def take(self, _model: str, data: bytes) -> None:
        """Applies settings, as `Apply`."""


async def follow_log(bus: Bus, log: RoleLog) -> None:
    """Applies the log settings to a role's log: all that roles other than gateways apply."""
    settings = SharedSettings(bus)
    settings.follow(LOGGING, log.take)
    await settings.start()
