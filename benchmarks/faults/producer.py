"""Single durable requests, published with the stock NATS client, and what became of them."""

from __future__ import annotations

import asyncio

import nats
from nats.js.errors import NotFoundError

from benchmarks.faults.models import bytes_request
from bus.durable_subjects import RESULT_STREAM, event, result

_PATIENCE_S = 60.0

Told = dict[str, str]
"""The headers of an answer, in lower case; "body" is the rest of it."""


async def produce(url: str, model: str, data: bytes, id: str, **headers: str) -> Told:
    """Publishes a request of some bytes and returns its terminal record. Raises TimeoutError where it gets none."""
    client = await nats.connect(url)
    try:
        body, named = bytes_request(data)
        named |= {"Nats-Msg-Id": id} | {name.replace("_", "-"): value for name, value in headers.items()}
        jetstream = client.jetstream()
        await jetstream.publish(event(model), body, headers=named)
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                try:
                    found = await jetstream.get_last_msg(RESULT_STREAM, result(model, id))
                    told = {name.lower(): value for name, value in (found.headers or {}).items()}
                    return {**told, "body": (found.data or b"").decode(errors="replace")}
                except NotFoundError:
                    await asyncio.sleep(0.05)
    finally:
        await client.close()
