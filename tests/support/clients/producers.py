"""`Producer`: publishes durable requests with the stock NATS client and reads their results."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from tests.support.waiting import eventually

Answer = tuple[dict[str, str], bytes]


def int64_body(value: int, name: str = "IN", **more: Any) -> bytes:
    """A request of one INT64 value, as JSON."""
    tensor = {"name": name, "datatype": "INT64", "shape": [1, 1], "data": [value]}
    return json.dumps({**more, "inputs": [tensor]}).encode()


def value_of(body: bytes) -> Any:
    """The value in an answer to it."""
    return json.loads(body)["outputs"][0]["data"][0]


class Producer:
    """Publishes durable requests and reads their results."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.jetstream = client.jetstream()

    async def send(self, subject: str, body: bytes, **headers: str) -> int:
        """Publishes with headers (`_` for `-`), for as long as it takes; returns the sequence in QUEUE."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        while True:
            try:
                return (await self.jetstream.publish(subject, body, headers=named, timeout=5)).seq
            except (NatsError, TimeoutError, OSError):
                await asyncio.sleep(0.1)

    async def answers(self) -> tuple[str, list[Answer]]:
        """A reply subject, and what comes there."""
        inbox, came = self.client.new_inbox(), list[Answer]()

        async def take(message: Msg) -> None:
            came.append((dict(message.headers or {}), message.data))

        await self.client.subscribe(inbox, cb=take)
        return inbox, came

    async def ask(self, subject: str, body: bytes, **headers: str) -> Answer:
        """The answer to a request, on its reply subject."""
        inbox, came = await self.answers()
        await self.send(subject, body, Weir_Reply_To=inbox, **headers)
        await eventually(lambda: came)
        return came[0]

    async def record(self, model: str, id: str) -> Answer:
        """The terminal record of a request, once it is there."""
        async with asyncio.timeout(20):
            while True:
                try:
                    found = await self.jetstream.get_last_msg("RESULT", f"result.{model}.{id}")
                    return dict(found.headers or {}), found.data or b""
                except (NotFoundError, TimeoutError):
                    await asyncio.sleep(0.02)

    async def records(self, model: str) -> list[tuple[str, Answer]]:
        """All records of a model: (id, record)."""
        config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
        pull = await self.jetstream.pull_subscribe(f"result.{model}.*", stream="RESULT", config=config)
        found: list[tuple[str, Answer]] = []
        while True:
            try:
                for message in await pull.fetch(500, timeout=0.5):
                    id = message.subject.rpartition(".")[2]
                    found.append((id, (dict(message.headers or {}), message.data)))
                    await message.ack()
            except TimeoutError:
                return found

    async def cancel(self, model: str, id: str) -> None:
        """Writes the record of a cancelled request, as gateways do, and tells the model's owner of it."""
        record = {"Weir-Outcome": "cancelled", "Weir-Id": id, "Nats-Expected-Last-Subject-Sequence": "0"}
        await self.jetstream.publish(f"result.{model}.{id}", b"", headers=record)
        await self.client.publish("durable.cancel", json.dumps({"id": id, "model": model}).encode())

    async def count(self, stream: str) -> int:
        """How many messages a stream holds."""
        try:
            return (await self.jetstream.stream_info(stream)).state.messages
        except (NatsError, TimeoutError, OSError):
            return -1

    async def settled(self, results: int, timeout_s: float = 60.0) -> None:
        """Returns when RESULT holds so many records and QUEUE is empty."""
        deadline_s = time.monotonic() + timeout_s
        while (found := (await self.count("RESULT"), await self.count("QUEUE"))) != (results, 0):
            assert time.monotonic() < deadline_s, f"{found} in RESULT and QUEUE, not {(results, 0)}"
            await asyncio.sleep(0.05)


@asynccontextmanager
async def producer(url: str) -> AsyncIterator[Producer]:
    """A producer that survives its broker."""
    client = await nats.connect(url.split(","), max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    try:
        yield Producer(client)
    finally:
        await client.close()
