"""`LiveSettings`: the settings that clients may change while the server runs, as both doors show and change them.

A change holds in this gateway once it is answered, and in all other processes a moment later.
"""

from __future__ import annotations

from bus.settings import LOGGING, TRACE, SharedSettings
from calls.tracing import Tracing
from telemetry import log_settings, trace_settings
from telemetry.logs import RoleLog
from telemetry.trace_settings import pack_overrides, unpack_overrides


class LiveSettings:
    """See the module. `shared` are everybody's, `tracing` and `log` are this gateway's."""

    def __init__(self, shared: SharedSettings, tracing: Tracing, log: RoleLog) -> None:
        self._shared = shared
        self._tracing = tracing
        self._log = log

    async def start(self) -> None:
        """Follows what others change from now on."""
        self._shared.follow(LOGGING, self._log.take)
        self._shared.follow(TRACE, self._take_trace)
        await self._shared.start()

    def trace(self, model: str = "") -> dict[str, str | list[str]]:
        """The trace setting of a model, or the global one."""
        return self._tracing.told(model)

    async def change_trace(self, model: str, changes: trace_settings.Changes) -> dict[str, str | list[str]]:
        """The trace setting after these changes. Raises WeirError where they can't be told to the others."""
        if changes:
            overrides = self._tracing.settings.changed(model, changes)
            await self._shared.write(TRACE, model, pack_overrides(overrides))
        return self.trace(model)

    def log(self) -> dict[str, str | bool | int]:
        """The log settings."""
        return self._log.settings.told()

    async def change_log(self, changes: log_settings.Changes) -> dict[str, str | bool | int]:
        """The log settings after these changes. Raises WeirError where they can't be told to the others."""
        if changes:
            await self._shared.write(LOGGING, "", log_settings.pack_changes({**self._log.changes, **changes}))
        return self.log()

    def _take_trace(self, model: str, data: bytes) -> None:
        self._tracing.replace(model, unpack_overrides(data) if data else {})
