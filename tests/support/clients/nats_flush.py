"""`flush`: a flush of nats-py's client that covers everything that the client was asked to send.

nats-py's own writes its PING to the socket at once, ahead of the SUB and PUB that wait for the client's writer task. So the
PONG may come before nats-server has read a subscription, and what another connection publishes then has no subscriber.
"""

from __future__ import annotations

from nats.aio.client import Client


async def flush(client: Client) -> None:
    """Returns when nats-server has processed the subscriptions and messages so far. Raises nats-py's errors."""
    await client.flush()  # while its PONG is awaited, the writer task writes what waits
    await client.flush()
