"""`LiveSettings`: trace and log settings that clients may read and change while the server runs.

A change is in effect in all gateways when its client gets the response, and in all other processes a moment later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weir.bus.kv.settings import LOGGING, TRACE, SharedSettings
from weir.calls.tracing import Tracing
from weir.gateway.admin.peers import Synchronise, no_peers
from weir.telemetry import log_settings
from weir.telemetry.logs import RoleLog
from weir.telemetry.tracing import settings as trace_settings
from weir.telemetry.tracing.settings import pack_overrides, unpack_overrides


class LiveSettings:
    """Reads and changes the settings. `shared` are those of the cluster; `tracing` and `log` are those of this process.

    `synchronise` waits for the other gateways.
    """

    def __init__(
        self, shared: SharedSettings, tracing: Tracing, log: RoleLog, synchronise: Synchronise = no_peers
    ) -> None:
        self._shared = shared
        self._tracing = tracing
        self._log = log
        self._synchronise = synchronise

    async def start(self) -> None:
        """Applies the changes of other processes from now on."""
        self._shared.follow(LOGGING, self._log.take)
        self._shared.follow(TRACE, self._take_trace)
        await self._shared.start()

    def trace(self, model: str = "") -> dict[str, str | list[str]]:
        """The trace setting of `model`, or the global one."""
        return self._tracing.to_dict(model)

    async def change_trace(self, model: str, changes: trace_settings.Changes) -> dict[str, str | list[str]]:
        """Applies changes and returns the trace setting. Raises WeirError if the other processes can't be notified."""
        if changes:
            await self._shared.change(TRACE, model, lambda known: _changed_trace(known, changes))
            await self._synchronise()
        return self.trace(model)

    def log(self) -> dict[str, str | bool | int]:
        """The log settings."""
        return self._log.settings.to_dict()

    async def change_log(self, changes: log_settings.Changes) -> dict[str, str | bool | int]:
        """Applies changes and returns the log settings. Raises WeirError if the other processes can't be notified."""
        if changes:
            await self._shared.change(LOGGING, "", lambda known: _changed_log(known, changes))
            await self._synchronise()
        return self.log()

    def _take_trace(self, model: str, data: bytes) -> None:
        self._tracing.replace(model, unpack_overrides(data) if data else {})


def _changed_trace(known: bytes, changes: trace_settings.Changes) -> bytes:
    return pack_overrides(trace_settings.merged(_read(unpack_overrides, known), changes))


def _changed_log(known: bytes, changes: log_settings.Changes) -> bytes:
    return log_settings.pack_changes({**_read(log_settings.unpack_changes, known), **changes})


def _read(unpack: Callable[[bytes], dict[str, Any]], known: bytes) -> dict[str, Any]:
    """The settings in the bucket; none where they are malformed, which no role has applied."""
    try:
        return unpack(known) if known else {}
    except ValueError:
        return {}
