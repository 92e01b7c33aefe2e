"""What a broker says of its streams."""

from __future__ import annotations

import nats


async def replicas_of(url: str) -> set[int]:
    """How many servers keep its streams: all the numbers there are."""
    client = await nats.connect(url.split(","))
    try:
        return {info.config.num_replicas for info in await client.jetstream().streams_info()}
    finally:
        await client.close()
