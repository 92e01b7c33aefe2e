"""nats-py's `Client`, imported without aiohttp, which nats-py loads for WebSockets wherever it is installed.

No role speaks NATS over WebSockets, and each would pay for it with 0.1 s of its start and 11 MiB.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

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
    """nats-py's client, which reconnects for ever, whatever comes in between.

    With `needs_tls` it speaks to no server unencrypted, whatever the server says that it can.
    """

    needs_tls = False

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self.needs_tls:
            info["tls_required"] = True  # or nats-py would tell anybody who answers there who we are
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        # nats-py closes for good when its user is revoked, or expires; the credentials may be renewed.
        if self.is_connected and "permissions violation" not in err_msg.lower():
            logger.warning("nats-server ended the connection for administration: %s", err_msg)
            await self._process_op_err(ConnectionError(err_msg))
            return
        await super()._process_err(err_msg)

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
