"""`tests.support.clients.nats_flush.flush`: nats-server has a subscription before it answers the last PING."""

from __future__ import annotations

import asyncio
from typing import Any

import nats

from tests.support.clients.nats_flush import flush


class Server:
    """What a client sends to a server that answers each PING, line by line."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"s","version":"2.12.6","max_payload":1048576,"headers":true}\r\n')
        async for line in reader:
            self.lines.append(line.rstrip())
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
        writer.close()


async def test_the_server_has_a_subscription_when_a_flush_returns() -> None:
    served = Server()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    client = await nats.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def take(_: Any) -> None:
        """Nothing comes."""

    await client.subscribe("answers.*", cb=take)
    await flush(client)
    assert served.lines[-3:] == [b"PING", b"SUB answers.*  1", b"PING"]
    await client.close()
    server.close()
    await server.wait_closed()
