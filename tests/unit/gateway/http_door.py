"""An HTTP front door for tests: the real protocol and application, and an inference that the test answers for."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from calls.catalog import ServedModel
from calls.pending import OnAnswer
from calls.shut_queues import ShutQueues
from calls.tracing import Tracing
from gateway.doors import Doors
from gateway.http.app import make_app
from gateway.http.protocol import HttpProtocol
from gateway.listeners import Listeners
from schemas.errors import not_found
from schemas.model_config import ModelConfig
from schemas.request_limits import RequestLimits
from schemas.requests import InferRequest

CONFIG = ModelConfig.model_validate(
    {
        "name": "m",
        "backend": "python",
        "input": [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "out", "data_type": "TYPE_STRING", "dims": [1]}],
        "model_transaction_policy": {"decoupled": True},
    }
)


class OneModel:
    def resolve(self, name: str, version: str) -> ServedModel:
        if name != "m" or version not in ("", "1"):
            raise not_found(f"Request for unknown model: '{name}' is not found")
        return ServedModel("m", CONFIG, [1], {})


class FakeInference:
    """Holds what was asked until the test answers."""

    def __init__(self) -> None:
        self.tracing = Tracing()
        self.shut = ShutQueues()
        self.asked: asyncio.Queue[tuple[InferRequest, OnAnswer]] = asyncio.Queue()
        self.abandoned = asyncio.Event()

    def submit(self, request: InferRequest, on_answer: OnAnswer, _slot: Any = None, _traced: Any = None) -> object:
        self.asked.put_nowait((request, on_answer))
        return SimpleNamespace(request=request, model=OneModel().resolve("m", ""))

    def caches(self, _model: ServedModel) -> bool:
        return False

    def abandon(self, _pending: object) -> None:
        self.abandoned.set()


class Door:
    """A running server with an inference, and connections to it."""

    def __init__(self, port: int, inference: FakeInference, doors: Doors, listeners: Listeners) -> None:
        self.port = port
        self.listeners = listeners
        self.inference = inference
        self.ledger = doors.ledger
        self.arriving_slots = doors.arriving_slots

    def check_progress(self, now_s: float) -> None:
        for connection in self.listeners.connections("HTTP"):
            connection.check_progress(now_s)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)

    async def ask(self, name: str, document: Any, *lines: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.open()
        body = json.dumps(document).encode()
        head = [f"POST /v2/models/m/{name} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines, "", ""]
        writer.write("\r\n".join(head).encode() + body)
        return reader, writer

    async def asked(self) -> tuple[InferRequest, OnAnswer]:
        return await self.inference.asked.get()


async def head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = (line.partition(": ") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value for name, _, value in headers}


async def chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline()).strip(), 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return data


def run(scenario: Callable[[Door], Awaitable[None]], input_size: int = 1 << 20, payloads: Any = None) -> None:
    async def serve() -> None:
        inference = FakeInference()
        limits = RequestLimits(input_size=input_size)
        doors = Doors(
            catalog=OneModel(),  # type: ignore[arg-type]
            readiness=None,  # type: ignore[arg-type]
            inference=inference,  # type: ignore[arg-type]
            payloads=payloads or SimpleNamespace(slot_for_body=lambda _size: None),
            limits=limits,
            server_id="triton",
            statistics=None,  # type: ignore[arg-type]
            settings=None,  # type: ignore[arg-type]
            durable=None,  # type: ignore[arg-type]
            repository=None,  # type: ignore[arg-type]
            regions=SimpleNamespace(find=None),  # type: ignore[arg-type]
        )
        listeners = Listeners()
        listeners.take("HTTP", "127.0.0.1", 0)
        async with asyncio.TaskGroup() as background:
            listeners.serve("HTTP", make_app(doors), functools.partial(HttpProtocol, doors, {}), background)
            try:
                door = Door(listeners.port("HTTP"), inference, doors, listeners)
                await asyncio.wait_for(scenario(door), 10)
            finally:
                listeners.stop("HTTP", at_once=True)

    asyncio.run(serve())
