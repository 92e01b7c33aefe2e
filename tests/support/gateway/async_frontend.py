"""An HTTP and gRPC frontend for asynchronous requests, with a real nats-server and an intake that tests control."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import nats
from nats.js.api import AckPolicy, ConsumerConfig

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.calls.catalog import ServedModel
from weir.calls.tracing import Tracing
from weir.durable.api.async_requests import AsyncRequests
from weir.durable.api.callbacks import Callbacks
from weir.durable.api.store import DurableStore
from weir.gateway.access import Access
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.server import GrpcServer
from weir.gateway.http.app import make_app
from weir.gateway.http.protocol import HttpProtocol
from weir.gateway.settings import GatewaySettings
from weir.http_server.listeners import HttpListeners
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, invalid, not_found
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.request import parse_infer_request
from weir.schemas.kserve.response import build_infer_response, error_body
from weir.schemas.wire.terminal import Outcome, TerminalRecord

CONFIG = ModelConfig.model_validate(
    {
        "name": "m",
        "backend": "python",
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
)
SERVED = {"m": ServedModel("m", CONFIG, [1, 2], {})}


class Models:
    def resolve(self, name: str, version: str) -> ServedModel:
        if name not in SERVED or version not in ("", "1", "2"):
            raise not_found(f"Request for unknown model: '{name}' is not found")
        return SERVED[name]


class FakeInference:
    """Nobody asks it: all requests are answered later."""

    def __init__(self) -> None:
        self.tracing = Tracing()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


class Intake:
    """Stands for the gateway that owns the model: takes requests up while `takes`, and answers them while `answers`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._jetstream = client.jetstream()
        self.takes = asyncio.Event()
        self.answers = asyncio.Event()
        self.takes.set()
        self.answers.set()
        self.failure: WeirError | None = None
        self.large = False
        self.stopped = False
        self.runs = 0
        self.seen: list[dict[str, str]] = []

    async def run(self) -> None:
        name = subjects.durable_consumer("event", "m")
        config = ConsumerConfig(
            durable_name=name,
            ack_policy=AckPolicy.EXPLICIT,
            filter_subjects=list(subjects.durable_filters("event", "m")),
        )
        await self._jetstream.add_consumer(subjects.QUEUE_STREAM, config)
        pulling = await self._jetstream.pull_subscribe_bind(name, subjects.QUEUE_STREAM)
        try:
            while not self.stopped:
                await self.takes.wait()
                try:
                    [message] = await pulling.fetch(1, 0.5)
                except TimeoutError:  # a cancellation may come out as one
                    continue
                await self._answer(message)
        finally:
            if self._client.is_connected:
                await self._jetstream.delete_consumer(subjects.QUEUE_STREAM, name)

    async def _answer(self, message: Any) -> None:
        headers = {name.lower(): value for name, value in message.headers.items()}
        self.seen.append(headers)
        await self.answers.wait()
        self.runs += 1
        body = message.data
        if "weir-object" in headers:
            store = await self._jetstream.object_store(subjects.REQUEST_OBJECTS)
            body = bytes((await store.get(headers["weir-object"])).data)
            await store.delete(headers["weir-object"])
        record = TerminalRecord(
            headers["nats-msg-id"], "m", Outcome.SUCCEEDED, "2", attempts=1, accepted_ms=5, ended_ms=6,
            digest=headers["weir-digest"],
        )  # fmt: skip
        content, more = self._answered(body, headers)
        if self.failure is not None:
            record.outcome, record.status = Outcome.FAILED, self.failure.http_status
            content, more = error_body(self.failure.message), {"Content-Type": "application/json"}
        if self.large:
            store = await self._jetstream.object_store(subjects.RESULT_OBJECTS)
            await store.put(record.id, content)
            content, more = b"", {**more, "Weir-Object": record.id}
        told = {**dict(record.headers()), **more}
        expected = {"Nats-Expected-Last-Subject-Sequence": "0"}
        try:
            await self._jetstream.publish(subjects.result("m", record.id), content, headers={**told, **expected})
        except nats.js.errors.APIError:
            pass  # it was cancelled
        else:
            if "weir-reply-to" in headers:
                await self._client.publish(headers["weir-reply-to"], content, headers=told)
        await message.ack_sync()

    def _answered(self, body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        length = headers.get("inference-header-content-length")
        request = parse_infer_request("m", "", body, None if length is None else int(length))
        tensor = request.inputs[0]
        response = InferResponse("m", "2", request.id, [Tensor("OUT", "FP32", tensor.shape, tensor.data)])
        chunks, json_length = build_infer_response(request, response)
        if json_length is None:
            return b"".join(chunks), {"Content-Type": "application/json"}
        more = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(json_length)}
        return b"".join(chunks), more


class Door:
    """A running gateway's HTTP and gRPC, and its intake."""

    def __init__(self, http_port: int, grpc_port: int, intake: Intake, later: AsyncRequests, client: Any) -> None:
        self.http_port = http_port
        self.grpc_port = grpc_port
        self.intake = intake
        self.later = later
        self.client = client
        self.callbacks: Any = None

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port, limit=1 << 26)
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        start = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*start, *lines, "", ""]).encode("latin-1") + body)
        told, _, content = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        first, *rows = told.decode("latin-1").split("\r\n")
        found = (row.partition(": ") for row in rows)
        return Answer(int(first.split()[1]), {name.lower(): value for name, _, value in found}, content)

    async def infer(self, document: Any, **headers: str) -> Answer:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return await self.ask("POST", "/v2/models/m/infer", body, **{"Prefer": "respond-async", **headers})

    async def accepted(self, document: Any, **headers: str) -> str:
        answer = await self.infer(document, **headers)
        assert answer.status == 202, answer
        return str(answer.document["id"])

    async def done(self, id: str) -> dict[str, Any]:
        answer = await self.ask("GET", f"/v2/jobs/{id}", Prefer="wait=10")
        assert answer.status == 200, answer
        assert "ended" in answer.document, answer
        return answer.document

    async def queued(self) -> int:
        return int((await self.client.jetstream().stream_info(subjects.QUEUE_STREAM)).state.messages)


def document(*values: float, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": list(values)}], **more}


def run(
    nats_url: str, scenario: Callable[[Door], Awaitable[None]], access: Access | None = None, **settings: Any
) -> None:
    asyncio.run(_serve(nats_url, scenario, access or Access(), settings))


async def _serve(
    url: str, scenario: Callable[[Door], Awaitable[None]], access: Access, settings: dict[str, Any]
) -> None:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "door", background)
        client = await nats.connect(url)
        chosen = GatewaySettings(nats_url=url, **settings)
        durable = DurableStore(bus, "door", chosen)
        later = AsyncRequests(durable, chosen)
        callbacks = Callbacks(bus, durable.messages, later.rules)
        await durable.start(background)
        await callbacks.start(background)
        doors: Any = GatewayContext(
            catalog=Models(),  # type: ignore[arg-type]
            readiness=None,  # type: ignore[arg-type]
            inference=FakeInference(),  # type: ignore[arg-type]
            payloads=None,  # type: ignore[arg-type]
            limits=RequestLimits(input_size=chosen.http_max_input_size),
            server_id="triton",
            statistics=None,  # type: ignore[arg-type]
            settings=None,  # type: ignore[arg-type]
            durable=durable,
            repository=None,  # type: ignore[arg-type]
            regions=_NoRegions(),  # type: ignore[arg-type]
            access=access,
            async_requests=later,
        )
        listeners = HttpListeners()
        listeners.bind("HTTP", "127.0.0.1", 0)
        await listeners.serve("HTTP", functools.partial(HttpProtocol, doors, {}, make_app(doors)))
        grpc_server = GrpcServer(doors)
        grpc_port = await grpc_server.start("127.0.0.1", 0)
        intake = Intake(client)
        taking = asyncio.create_task(intake.run())
        door = Door(listeners.port("HTTP"), grpc_port, intake, later, client)
        door.callbacks = callbacks
        try:
            await asyncio.wait_for(scenario(door), 20)
        finally:
            later.stop()
            callbacks.stop()
            intake.stopped = True
            taking.cancel()
            await asyncio.wait([taking])
            listeners.stop("HTTP", at_once=True)
            await grpc_server.stop(0)
            durable.stop()
            for stream in (subjects.QUEUE_STREAM, subjects.RESULT_STREAM) if client.is_connected else ():
                await client.jetstream().purge_stream(stream)
            await client.close()
            await bus.close()


class _NoRegions:
    def find(self, _name: str, _offset: int, _size: int) -> Any:
        raise invalid("no regions here")
