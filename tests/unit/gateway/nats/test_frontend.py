"""The NATS frontend on a fake bus: requests, errors, acknowledgements, and the stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.access.doors import open_gate
from weir.bus.nats.headers import pack_headers, parse_headers
from weir.calls.catalog import ServedModel
from weir.gateway.nats import call as nats_call
from weir.gateway.nats.frontend import NatsFrontend
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.offload import Offload
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import not_found
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.calls import Caller

CONFIG = ModelConfig.model_validate(
    {
        "name": "m",
        "input": [{"name": "IN", "data_type": "TYPE_UINT8", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_UINT8", "dims": [-1]}],
        "model_transaction_policy": {"decoupled": True},
    }
)
BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "UINT8", "shape": [1], "data": [7]}]}).encode()


class Bus:
    """Records subscriptions and responses; its broker is away when the frontend flushes."""

    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[Any], None]] = {}
        self.sent: dict[str, list[tuple[dict[str, str], bytes, str]]] = {}

    async def subscribe(self, subject: str, listener: Callable[[Any], None], *_: object, **__: object) -> Any:
        self.listeners[subject] = listener
        return lambda: self.listeners.pop(subject, None)

    async def flush(self) -> None:
        raise ConnectionError

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        self.sent.setdefault(subject, []).append((parse_headers(header_block), data, reply))


class Inference:
    def __init__(self) -> None:
        self.submitted: list[tuple[InferRequest, Callable[..., None]]] = []
        self.cancelled: list[object] = []

    def submit(
        self,
        request: InferRequest,
        on_response: Callable[..., None],
        traffic_key: str,
        served: ServedModel,
        caller: Caller,
    ) -> InferRequest:
        self.submitted.append((request, on_response))
        return request

    def cancel(self, pending: object) -> None:
        self.cancelled.append(pending)


class Catalog:
    def resolve(self, name: str, version: str) -> ServedModel:
        if name != "m":
            raise not_found(f"Request for unknown model: '{name}' is not found")
        return ServedModel("m", CONFIG, [1], {})


class World:
    """A started frontend with its bus and dispatcher."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.inference = Inference()
        self.ledger = MemoryLedger()
        context = SimpleNamespace(
            gate=open_gate(),
            access_log=None,
            catalog=Catalog(),
            inference=self.inference,
            ledger=self.ledger,
            limits=RequestLimits(),
            offload=Offload(),
            find_region=None,
        )
        self.frontend = NatsFrontend(cast(Any, self.bus), "gateway", cast(Any, context))

    def request(self, subject: str = "infer.m", reply: str = "_INBOX.a", body: bytes = BODY, **headers: str) -> None:
        prefix = "by.*." if subject.startswith("by.") else ""
        pattern = prefix + ("infer.*.*" if subject.count(".") - prefix.count(".") == 2 else "infer.*")
        block = pack_headers([(name.replace("_", "-"), value) for name, value in headers.items()])
        self.bus.listeners[pattern](
            SimpleNamespace(subject=subject, reply=reply, data=body, header_block=block, status="")
        )

    def respond(self, number: int = 0, is_final: bool = True) -> None:
        output = Tensor("OUT", "UINT8", [1], b"\x01")
        self.inference.submitted[number][1](InferResponse("m", "1", "", [output], None), is_final)

    def acknowledge(self, subject: str, status: str = "") -> None:
        pattern = "by.*.flow.gateway.*" if subject.startswith("by.") else "flow.gateway.*"
        self.bus.listeners[pattern](SimpleNamespace(subject=subject, status=status))

    def responses(self, reply: str = "_INBOX.a") -> list[dict[str, str]]:
        return [headers for headers, _, _ in self.bus.sent.get(reply, [])]


@pytest.fixture
async def world() -> World:
    made = World()
    await made.frontend.start()
    return made


async def test_a_request_is_submitted_and_answered_on_its_reply_subject(world: World) -> None:
    world.request("infer.m.v01")
    ((request, _),) = world.inference.submitted
    assert (request.model_name, request.model_version) == ("m", "1")
    world.respond(is_final=False)
    world.respond()
    assert [headers["weir-final"] for headers in world.responses()] == ["false", "true"]
    assert world.ledger.total_bytes == 0


async def test_subjects_of_a_broker_user_serve_as_the_plain_ones_do(world: World) -> None:
    world.request("by.alice.infer.m")
    world.request("by.alice.infer.m.v1", reply="_INBOX.b")
    versions = [request.model_version for request, _ in world.inference.submitted]
    assert versions == ["", "1"]
    world.respond(0)
    world.respond(1)
    for reply in ("_INBOX.a", "_INBOX.b"):
        assert [headers["weir-outcome"] for headers in world.responses(reply)] == ["succeeded"]


async def test_only_the_user_of_a_request_acknowledges_its_responses(world: World) -> None:
    world.request("by.alice.infer.m", weir_window="1")
    world.respond(is_final=False)
    ((_, _, flow),) = world.bus.sent["_INBOX.a"]
    assert flow == "by.alice.flow.gateway.1"
    world.respond(is_final=False)
    for forged in ("flow.gateway.1", "by.bob.flow.gateway.1"):
        world.acknowledge(forged)
        world.acknowledge(forged, "503")
    assert (len(world.responses()), world.inference.cancelled) == (1, [])
    world.acknowledge(flow)
    assert len(world.responses()) == 2
    world.acknowledge(flow, "503")
    assert len(world.inference.cancelled) == 1


async def test_a_user_acknowledges_nothing_of_plain_requests(world: World) -> None:
    world.request("infer.m", weir_window="1")
    world.respond(is_final=False)
    world.respond(is_final=False)
    world.acknowledge("by.alice.flow.gateway.1", "503")
    assert world.inference.cancelled == []
    world.acknowledge("flow.gateway.1")
    assert len(world.responses()) == 2


async def test_errors_are_responses(world: World) -> None:
    world.request("infer.absent")
    world.request(weir_priority="high")
    statuses = [headers["nats-service-error-code"] for headers in world.responses()]
    assert statuses == ["404", "400"]
    assert not world.inference.submitted


async def test_an_unexpected_exception_is_answered_with_500(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.inference, "submit", None)
    world.request()
    assert [headers["nats-service-error-code"] for headers in world.responses()] == ["500"]


async def test_a_request_without_a_reply_subject_is_dropped(world: World) -> None:
    world.request(reply="")
    assert not world.inference.submitted


async def test_a_client_that_disconnects_has_its_request_cancelled(world: World) -> None:
    world.request()
    world.respond(is_final=False)
    ((_, _, flow),) = world.bus.sent["_INBOX.a"]
    world.acknowledge(flow, "503")
    assert len(world.inference.cancelled) == 1
    world.acknowledge(flow)  # it is unknown by now
    assert world.ledger.total_bytes == 0


async def test_a_stop_sends_each_client_a_final_response(world: World) -> None:
    world.request(weir_window="1")
    await world.frontend.stop()
    assert not [subject for subject in world.bus.listeners if subject.startswith("infer")]
    world.respond(is_final=False)
    world.respond()
    await world.frontend.close(0.01)
    first, last = world.responses()
    assert "nats-service-error" not in first
    assert last["nats-service-error"] == "the server is stopping"
    assert world.ledger.total_bytes == 0


async def test_a_stop_waits_for_clients_that_acknowledge_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_call, "STOP_ACKNOWLEDGEMENT_TIMEOUT_S", 0.2)
    for number, reply in enumerate(("_INBOX.silent", "_INBOX.slow")):
        world.request(reply=reply, weir_window="1")
        for response in range(5):
            world.respond(number, is_final=response == 4)
    closing = asyncio.create_task(world.frontend.close(20))
    while len(world.responses("_INBOX.slow")) < 5:
        await asyncio.sleep(0.1)
        world.acknowledge(world.bus.sent["_INBOX.slow"][-1][2])
    await asyncio.wait_for(closing, 10)
    silent = world.responses("_INBOX.silent")
    assert (len(silent), silent[-1]["nats-service-error"]) == (2, "the server is stopping")
    assert "nats-service-error" not in world.responses("_INBOX.slow")[-1]
