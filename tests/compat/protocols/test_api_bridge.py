"""The HTTP API over the bus: the same statuses, texts and rules as over HTTP."""

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.support.models.zoo import write_identity, write_slow, write_streamer
from tests.support.servers.nats import GivenNats
from tests.support.servers.weir_server import Server
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.calls.gateway_api import GatewayApi, Response
from weir.gateway.nats.api_bridge import MAX_IN_FLIGHT
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.gateway_api import ApiResponse

KEY = {"admin-key": "secret"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bridge")
    write_identity(folder / "models", "identity", "INT32", "dynamic_batching { }")
    write_streamer(folder / "models", "streamer", "")
    write_slow(folder / "models")
    restricted = "--http-restricted-api=model-repository:admin-key=secret"
    started = Server(folder, folder / "models", "--model-control-mode=explicit", "--load-model=*", restricted)
    try:
        yield started
        assert started.stop() == 0
        assert "Traceback" not in started.log()
    finally:
        started.close()


@pytest.fixture
async def bus(server: Server) -> AsyncIterator[Bus]:
    async with asyncio.TaskGroup() as background:
        connected = await Bus.connect(server.nats_url, "console-test", background, role="console")
        yield connected
        await connected.close()


@pytest.fixture
async def api(bus: Bus) -> GatewayApi:
    made = GatewayApi(bus, "console-test")
    await made.start()
    return made


def over_http(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://{server.http_place}{path}", body or None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=15) as answer:
            return answer.status, _document(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, _document(error.read())


def _document(body: bytes) -> Any:
    return json.loads(body) if body else None


def _pair(response: Response) -> tuple[int, Any]:
    return response.status, _document(response.body)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v2", b""),
        ("GET", "/v2/models/identity", b""),
        ("GET", "/v2/models/identity/config", b""),
        ("GET", "/v2/models/identi%74y/versions/1/stats", b""),
        ("GET", "/v2/models/none", b""),
        ("GET", "/v2/health/ready", b""),
        ("GET", "/nowhere", b""),
        ("GET", "/v2/jobs?state=wrong", b""),
        ("POST", "/v2/jobs", b"{"),
        ("POST", "/v2/models/identity/generate", b"{}"),
        ("GET", "/v2/models/identity/infer", b""),
        ("POST", "/v2/repository/index", b"{}"),
        ("GET", "/v2/models/identity/traffic", b""),
    ],
)
async def test_a_request_is_answered_as_over_http(
    server: Server, api: GatewayApi, method: str, path: str, body: bytes
) -> None:
    expected = await asyncio.to_thread(over_http, server, method, path, body)
    assert _pair(await api.request(method, path, body=body)) == expected


async def test_a_restricted_api_needs_its_header(api: GatewayApi) -> None:
    refused = await api.request("POST", "/v2/repository/index", body=b"{}")
    assert refused.status == 403
    assert "admin-key" in json.loads(refused.body)["error"]
    allowed = await api.request("POST", "/v2/repository/index", KEY, b"{}")
    assert (allowed.status, allowed.headers["content-type"]) == (200, "application/json")
    assert {row["name"] for row in json.loads(allowed.body)} == {"identity", "slow", "streamer"}


async def test_a_model_is_unloaded_and_loaded_and_the_history_names_who_did(api: GatewayApi) -> None:
    said = {**KEY, "Weir-By": "ana"}
    assert (await api.request("POST", "/v2/repository/models/identity/unload", said, b"{}", 30)).status == 200
    assert (await api.request("GET", "/v2/models/identity/ready")).status == 400
    assert (await api.request("POST", "/v2/repository/models/identity/load", said, b"{}", 30)).status == 200
    assert (await api.request("GET", "/v2/models/identity/ready")).status == 200
    history = await api.request("GET", "/v2/models/identity/history", KEY)
    assert b"ana (nats)" in history.body


async def test_a_request_of_a_foreign_page_is_refused(api: GatewayApi) -> None:
    foreign = await api.request("POST", "/v2/repository/index", {**KEY, "Origin": "http://evil.example"}, b"{}")
    assert foreign.status == 403


async def test_inference_is_not_part_of_it(api: GatewayApi) -> None:
    assert (await api.request("POST", "/v2/models/identity/infer", body=b"{}")).status == 405


async def test_a_response_that_no_message_holds_is_413(server: Server, bus: Bus, api: GatewayApi) -> None:
    plan = json.dumps({"responses": 1, "size": bus.max_payload_bytes})
    response = await api.request("POST", "/v2/models/streamer/generate", body=json.dumps({"PLAN": plan}).encode())
    assert response.status == 413
    assert re.search(r"larger than the \d+ bytes that the message broker takes", response.body.decode())


async def test_a_request_that_is_too_large_is_rejected_before_it_is_sent(bus: Bus, api: GatewayApi) -> None:
    with pytest.raises(WeirError, match=r"is larger than the .* that the message broker takes"):
        await api.request("POST", "/v2/jobs", body=bytes(bus.max_payload_bytes))


@pytest.mark.parametrize(("method", "path"), [("get", "/v2"), ("GET", "v2"), ("GET", "/a b"), ("GET", "/ä")])
async def test_a_malformed_request_is_rejected_before_it_is_sent(api: GatewayApi, method: str, path: str) -> None:
    with pytest.raises(WeirError, match="is not a valid request"):
        await api.request(method, path)


async def test_garbage_is_answered_with_400_and_a_reserved_reply_subject_is_not(
    server: Server, api: GatewayApi
) -> None:
    client = await nats.connect(server.nats_url)
    reply = await client.request(subjects.API_REQUEST, b"\x00garbage", timeout=20)
    assert ApiResponse.unpack(reply.data).status == 400
    await client.publish(subjects.API_REQUEST, b"\x00", reply="result.identity.forged")
    assert (await api.request("GET", "/v2")).status == 200
    await client.close()


async def test_many_at_once_are_answered_or_rejected_for_now(api: GatewayApi) -> None:
    responses = await asyncio.gather(*(api.request("GET", "/v2/models/identity") for _ in range(3 * MAX_IN_FLIGHT)))
    statuses = {response.status for response in responses}
    assert statuses <= {200, 503}
    assert 200 in statuses
    assert (await api.request("GET", "/v2")).status == 200


async def test_long_polls_leave_places_for_others(server: Server, api: GatewayApi) -> None:
    values = (("VALUE", "INT64", 1), ("DELAY_MS", "FP32", 3000.0))
    inputs = [{"name": name, "datatype": kind, "shape": [1, 1], "data": [value]} for name, kind, value in values]
    body = json.dumps({"inputs": inputs}).encode()
    _, accepted = await asyncio.to_thread(
        over_http, server, "POST", "/v2/models/slow/infer", body, Prefer="respond-async"
    )
    path, wait = f"/v2/jobs/{accepted['id']}", {"Prefer": "wait=30"}
    polls = [asyncio.create_task(api.request("GET", path, wait, timeout_s=40)) for _ in range(4 * MAX_IN_FLIGHT)]
    for _ in range(10):
        assert (await api.request("GET", "/v2")).status == 200
    assert {_document(poll.body)["status"] for poll in await asyncio.gather(*polls)} == {"succeeded"}


async def test_without_a_gateway_the_error_says_so(tmp_path: Path) -> None:
    broker = GivenNats(tmp_path / "nats")
    try:
        async with asyncio.TaskGroup() as background:
            bus = await Bus.connect(broker.url, "console-alone", background, role="console")
            api = GatewayApi(bus, "console-alone")
            await api.start()
            with pytest.raises(WeirError, match="no gateway is connected to the message broker"):
                await api.request("GET", "/v2")
            await bus.subscribe(subjects.API_REQUEST, lambda _: None, subjects.API_QUEUE)
            with pytest.raises(WeirError, match=r"no gateway answered GET /v2 within 0\.2 s"):
                await api.request("GET", "/v2", timeout_s=0.2)
            waiting = asyncio.create_task(api.request("GET", "/v2", timeout_s=30))
            await bus.flush()
            broker.stop()
            with pytest.raises(WeirError, match="was lost before"):
                await waiting
            with pytest.raises(WeirError, match="is not connected"):
                await api.request("GET", "/v2")
            await bus.close()
    finally:
        broker.stop()
