"""`SharedSettings`: settings that clients change at run time, and that all roles apply.

They are in bucket `settings`, in memory: key `logging` for the log, `trace` for the global trace setting and
`trace.<model>` for the one of a model. The gateway that receives a change writes it; all roles follow the bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from weir.bus.kv.typed_bucket import TypedBucket, without_broker_errors
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import SETTINGS_BUCKET

logger = logging.getLogger("weir.bus")

LOGGING, TRACE = "logging", "trace"
"""The kinds of settings."""

MAX_SETTING_BYTES = 4096
"""The most that the settings of one key may take."""

Apply = Callable[[str, bytes], None]
"""Applies the settings of a model ("": the global ones), or b"" after they were removed. Raises ValueError if malformed."""


class SharedSettings(TypedBucket[bytes]):
    """One role's view of the settings, by key. It keeps all, to restore a lost bucket, and applies followed kinds."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, SETTINGS_BUCKET, bytes, _checked)
        self._follow: dict[str, Apply] = {}
        self.on_change(self._apply)

    def follow(self, kind: str, apply: Apply) -> None:
        """Calls `apply` with the settings of this kind, in the event loop, whenever they have changed. Before `start`."""
        self._follow[kind] = apply

    async def change(self, kind: str, model: str, change: Callable[[bytes], bytes]) -> None:
        """Replaces settings by what `change` makes of them (b"": none), here and in the other roles.

        Raises WeirError (UNAVAILABLE) without a broker.
        """
        with without_broker_errors(f"{kind} settings"):
            await self.update(subjects.settings_key(kind, model), lambda known: change(known or b"") or None)

    def _apply(self, key: str) -> None:
        kind, model = subjects.parse_settings_key(key)
        try:
            if kind in self._follow:
                self._follow[kind](model, self.get(key) or b"")
        except ValueError as error:
            self.malformed += 1
            logger.warning("dropped settings %r: %s", key, error)

    def _key(self, name: str) -> str:
        return name

    def _name(self, key: str) -> str:
        return key


def _checked(data: bytes) -> bytes:
    if len(data) > MAX_SETTING_BYTES:
        raise ValueError(f"it is larger than {MAX_SETTING_BYTES} bytes")
    return data


class RoleLog(Protocol):
    """A log with settings (`weir.telemetry.logs.RoleLog`)."""

    def take(self, _model: str, data: bytes) -> None:
        """Applies settings, as `Apply`."""


async def follow_log(bus: Bus, log: RoleLog) -> None:
    """Applies the log settings to a role's log: all that roles other than gateways apply."""
    settings = SharedSettings(bus)
    settings.follow(LOGGING, log.take)
    await settings.start()
