"""A new way to ask is one codec: a door shaped like OpenAI's `/v1/embeddings`, with a form that streams, on a real server.

The door names its model in the body, as gRPC does, and is served beside the gateway by a listener of the test. It stands in
for the real one, and goes when that comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tests.support.access.doors import application, open_gate
from tests.support.clients.inference_caller import Caller, caller
from tests.support.models.zoo import write_streamer
from tests.support.servers.weir_server import Server
from tests.support.waiting import eventually
from weir.access.policy.actions import Action
from weir.calls.catalog import ServedModel
from weir.calls.inference.call import MAX_WAITING_BYTES
from weir.calls.inference.documents import Document
from weir.gateway.access import OPEN
from weir.gateway.http.events import EventCall, EventResponse
from weir.gateway.http.routing import post
from weir.http_server.client_connection import ConnectionLimits
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_cap import ConnectionCap
from weir.http_server.listeners import HttpListeners
from weir.http_server.responses import weir_error_response
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.offload import Offload
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor, pack_bytes
from weir.schemas.kserve.json_documents import load_json
from weir.schemas.kserve.offloaded import Job

# The door


class EmbeddingsCodec:
    """Reads `{"model": …, "input": …}`; writes an embedding."""

    def read_job(self, source: Document, context: Any) -> Job | None:
        return None

    def read(self, source: Document, parts: Sequence[memoryview], context: Any) -> tuple[ServedModel, InferRequest]:
        document = load_json(source.data)
        if not isinstance(document, dict) or not isinstance(document.get("input"), str):
            raise invalid("'input' must be a string")
        served = context.catalog.resolve(str(document.get("model")), "")
        text = pack_bytes([document["input"].encode()])
        return served, InferRequest(served.name, inputs=[Tensor("PLAN", "BYTES", [1, 1], text)])

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        return None

    def write(self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Any) -> bytes:
        number, content = response.outputs
        row = {
            "object": "embedding",
            "index": number.to_numpy()[0, 0].item(),
            "embedding": content.to_numpy()[0].tolist(),
        }
        return orjson.dumps({"object": "list", "data": [row], "model": served.name})


def embeddings_app(context: Any, calls: list[EventCall]) -> Starlette:
    """The door; `calls` are those that it has opened."""

    async def embeddings(request: Request) -> Response:
        body = await request.body()
        call = EventCall(context, EmbeddingsCodec(), request, Document(None, "", "", body))  # type: ignore[arg-type]
        calls.append(call)
        try:
            await call.opened()
        except WeirError as error:
            return weir_error_response(error)
        return EventResponse(call, is_stream=bool(load_json(body).get("stream")))

    return application([post("/v1/embeddings", embeddings, Action.INFER, lists=True)])


# Its tests


class Door:
    def __init__(self, port: int, ledger: MemoryLedger, asking: Caller, calls: list[EventCall]) -> None:
        self.port = port
        self.ledger = ledger
        self.caller = asking
        self.calls = calls
        self.writers: list[asyncio.StreamWriter] = []

    async def ask(self, plan: dict[str, Any] | str, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)
        self.writers.append(writer)
        text = plan if isinstance(plan, str) else json.dumps(plan)
        body = json.dumps({"model": "streamer", "input": text, **more}).encode()
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return reader, writer


async def head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    rows = (line.partition(": ") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value for name, _, value in rows}


async def events(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    while size := int(await reader.readline(), 16):
        yield json.loads((await reader.readexactly(size)).removeprefix(b"data: "))
        await reader.readline()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embeddings")
    write_streamer(folder / "models", "streamer", "")
    started = Server(folder, folder / "models")
    try:
        yield started
        assert started.stop() == 0
    finally:
        started.close()


@asynccontextmanager
async def door(server: Server) -> AsyncIterator[Door]:
    async with caller(server.nats_url) as asking:
        await eventually(lambda: asking._catalog.is_ready("streamer", ""))
        ledger, offload, calls = MemoryLedger(), Offload(), list[EventCall]()
        context = SimpleNamespace(
            access=OPEN, catalog=asking._catalog, find_region=None, inference=asking.inference,
            limits=DEFAULT_LIMITS, load_reports=None, offload=offload, gate=open_gate(),
        )  # fmt: skip
        app = embeddings_app(context, calls)
        limits = ConnectionLimits(
            ledger=ledger, arriving_slots=MemoryLedger(), cap=ConnectionCap.of_process(), max_body_bytes=1 << 20
        )
        listeners = HttpListeners()
        listeners.bind("HTTP", "127.0.0.1", 0)
        await listeners.serve("HTTP", lambda connections: HttpConnection(app, limits, connections))
        try:
            async with asyncio.timeout(60):
                asked = Door(listeners.port("HTTP"), ledger, asking, calls)
                yield asked
                for writer in asked.writers:
                    writer.close()
                    with contextlib.suppress(ConnectionError):
                        await writer.wait_closed()
                await eventually(lambda: asking.inference.in_flight == 0 and ledger.total_bytes == 0)
        finally:
            listeners.stop("HTTP", at_once=True)
            offload.close()


async def test_one_embedding(server: Server) -> None:
    async with door(server) as asked:
        reader, _ = await asked.ask({"responses": 1, "size": 3})
        status, headers = await head(reader)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert (status, body["data"][0]["embedding"]) == (200, [0, 0, 0])


async def test_a_stream_of_embeddings(server: Server) -> None:
    async with door(server) as asked:
        reader, _ = await asked.ask({"responses": 4, "size": 2, "error_at": 2}, stream=True)
        status, headers = await head(reader)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        found = [event.get("error") or event["data"][0]["index"] async for event in events(reader)]
        assert found == [0, 1, "error 2", 3]


@pytest.mark.parametrize(
    ("more", "status"), [({"input": 5}, 400), ({"model": "unknown"}, 404), ({"input": "\ud800"}, 500)]
)
async def test_what_can_not_be_read_is_rejected(server: Server, more: dict[str, Any], status: int) -> None:
    async with door(server) as asked:
        reader, _ = await asked.ask("", **more)
        assert (await head(reader))[0] == status


async def test_a_server_without_room_rejects_with_503(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with door(server) as asked:
        monkeypatch.setattr("weir.calls.in_flight.MAX_IN_FLIGHT", 0)
        reader, _ = await asked.ask({"responses": 1})
        status, headers = await head(reader)
        assert (status, int(headers["retry-after"]) > 0) == (503, True)


async def test_a_client_that_leaves_cancels_its_model(server: Server, tmp_path: Path) -> None:
    async with door(server) as asked:
        reader, writer = await asked.ask({"until_cancelled": str(tmp_path / "sent")}, stream=True)
        await head(reader)
        writer.transport.abort()
        await eventually((tmp_path / "sent").exists)


async def test_a_slow_reader_holds_its_call_and_gets_everything(server: Server) -> None:
    async with door(server) as asked:
        count, size = 60, 200_000
        reader, _ = await asked.ask({"responses": count, "size": size}, stream=True)
        await head(reader)
        [call] = asked.calls
        await eventually(lambda: call.has_waiting)  # what the sockets take is full
        assert 0 < call.held_bytes <= MAX_WAITING_BYTES
        found = [event["data"][0]["index"] async for event in events(reader)]
        assert found == list(range(count))


async def test_a_reader_that_never_reads_is_ended_and_its_model_cancelled(server: Server, tmp_path: Path) -> None:
    async with door(server) as asked:
        plan = {"until_cancelled": str(tmp_path / "sent"), "size": 200_000}
        await asked.ask(plan, stream=True)
        await eventually((tmp_path / "sent").exists)
        assert int((tmp_path / "sent").read_text()) * 200_000 > MAX_WAITING_BYTES
