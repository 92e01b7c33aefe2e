"""nats-py's connection comes back whatever its server dies amid of."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bus.embedded import EmbeddedNats
from bus.nats_client import Client


async def test_a_server_that_dies_during_the_handshake_does_not_end_the_connection(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path)
    server.start()
    client = Client()
    try:
        await client.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)  # type: ignore[arg-type]
        greet, failures = (
            client._process_connect_init,
            [RuntimeError("the handler is closed"), AttributeError("_protocol")],
        )

        async def greet_badly() -> None:
            if failures:
                raise failures.pop()
            await greet()

        client._process_connect_init = greet_badly  # type: ignore[method-assign]
        await client._process_op_err(OSError("as when the server is gone"))
        async with asyncio.timeout(10):
            while failures or not client.is_connected:
                await asyncio.sleep(0.01)
        await client.flush()
    finally:
        await client.close()
        server.stop()
