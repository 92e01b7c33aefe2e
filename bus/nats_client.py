"""nats-py's `Client`, imported without aiohttp, which nats-py loads for WebSockets wherever it is installed.

No role speaks NATS over WebSockets, and each would pay for it with 0.1 s of its start and 11 MiB.
"""

from __future__ import annotations

import asyncio
import logging
import sys

_is_loaded = "aiohttp" in sys.modules
if not _is_loaded:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # to import it is an ImportError now, which nats-py expects
try:
    from nats.aio.client import Client as _Client
finally:
    if not _is_loaded:
        del sys.modules["aiohttp"]

logger = logging.getLogger("weir.bus")

_RECONNECT_WAIT_S = 0.1


class Client(_Client):
    """nats-py's client, which reconnects for ever, whatever comes in between."""

    async def _attempt_reconnect(self) -> None:
        # nats-py goes on after a NATS error or OSError only; a server that dies during the handshake is a RuntimeError of
        # uvloop's (a write to a closed transport), which ended this task, and the connection stayed away for good.
        while True:
            try:
                await super()._attempt_reconnect()
                return
            except (RuntimeError, AttributeError, ValueError) as error:
                logger.debug("nats-py gave up connecting again: %s: %s", type(error).__name__, error)
                self._status = Client.RECONNECTING
                await asyncio.sleep(_RECONNECT_WAIT_S)


__all__ = ["Client"]
