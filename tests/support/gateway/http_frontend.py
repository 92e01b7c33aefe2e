"""An HTTP frontend for tests: the real protocol and application, and a dispatcher for which the test responds."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from weir.calls.catalog import ServedModel
from weir.calls.in_flight import OnResponse
from weir.calls.queues import BackpressureCache
from weir.calls.tracing import Tracing
from weir.gateway.context import GatewayContext
from weir.gateway.http.app import make_app
from weir.gateway.http.protocol import HttpProtocol
from weir.http_server.listeners import HttpListeners
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import not_found
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.calls import ANYBODY, Caller

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
    sticky_headers: frozenset[str] = frozenset()

    def resolve(self, name: str, version: str) -> ServedModel:
        if name != "m" or version not in ("", "1"):
            raise not_found(f"Request for unknown model: '{name}' is not found")
        return ServedModel("m", CONFIG, [1], {})


class FakeInference:
    """Holds submitted requests until the test responds."""

    def __init__(self) -> None:
        self.tracing = Tracing()
        self.backpressure = BackpressureCache()
        self.submitted: asyncio.Queue[tuple[InferRequest, OnResponse]] = asyncio.Queue()
        self.callers: list[Caller] = []
        self.cancelled = asyncio.Event()

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse,
        _slot: Any = None,
        _traced: Any = None,
        traffic_key: str = "",
        served: ServedModel | None = None,
        caller: Caller = ANYBODY,
    ) -> object:
        self.callers.append(caller)
        self.submitted.put_nowait((request, on_response))
        return SimpleNamespace(request=request, model=OneModel().resolve("m", ""))

    def caches(self, _model: ServedModel) -> bool:
        return False

    def cancel(self, _pending: object) -> None:
        self.cancelled.set()


class HttpFrontend:
    """A running server with a dispatcher, and connections to it."""

    def __init__(self, port: int, inference: FakeInference, context: GatewayContext, listeners: HttpListeners) -> None:
        self.port = port
        self.listeners = listeners
        self.inference = inference
        self.ledger = context.ledger
        self.arriving_slots = context.arriving_slots

    def check_progress(self, now_s: float) -> None:
        for connection in self.listeners.connections("HTTP"):
            connection.check_progress(now_s)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)

    async def post(self, name: str, document: Any, *lines: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.open()
        body = json.dumps(document).encode()
        head = [f"POST /v2/models/m/{name} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines, "", ""]
        writer.write("\r\n".join(head).encode() + body)
        return reader, writer

    async def next_request(self) -> tuple[InferRequest, OnResponse]:
        return await self.inference.submitted.get()


async def head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = (line.partition(": ") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value for name, _, value in headers}


async def chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline()).strip(), 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return data


def run(scenario: Callable[[HttpFrontend], Awaitable[None]], input_size: int = 1 << 20, payloads: Any = None) -> None:
    async def serve() -> None:
        inference = FakeInference()
        limits = RequestLimits(input_size=input_size)
        context = GatewayContext(
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
        listeners = HttpListeners()
        listeners.bind("HTTP", "127.0.0.1", 0)
        async with asyncio.TaskGroup():
            await listeners.serve("HTTP", functools.partial(HttpProtocol, context, {}, make_app(context)))
            try:
                frontend = HttpFrontend(listeners.port("HTTP"), inference, context, listeners)
                # A helper that reads a large body has a low priority: it may wait long for a processor.
                await asyncio.wait_for(scenario(frontend), 50)
            finally:
                listeners.stop("HTTP", at_once=True)

    asyncio.run(serve())
