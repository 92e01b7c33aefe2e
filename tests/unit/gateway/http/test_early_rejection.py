"""A request to a queue in back-off is rejected by its head alone; its connection stays open."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.support.gateway.http_frontend import CONFIG, HttpFrontend, head, run
from weir.http_server.connection import MAX_CHUNKS
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal, overloaded
from weir.schemas.core.requests import InferRequest, InferResponse

BODY = json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a" * 2000]}]}).encode()


@pytest.fixture(autouse=True)
def _one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    monkeypatch.setattr("tests.support.gateway.http_frontend.CONFIG", ModelConfig.model_validate(config))


def shut(frontend: HttpFrontend) -> None:
    frontend.inference.backpressure.note(1e12, "m", InferRequest("m"), overloaded(wait_us=3e6, backoff_us=1_000_000))


def head_of(*lines: str, path: str = "/v2/models/m/infer") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


async def refusal(reader: asyncio.StreamReader) -> dict[str, str]:
    status, headers = await head(reader)
    assert (status, headers["retry-after"]) == (503, "3")
    body: Any = await reader.readexactly(int(headers["content-length"]))
    assert json.loads(body) == {"error": "Exceeds maximum queue size"}
    return headers


@pytest.mark.parametrize("length", [f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"])
def test_it_is_answered_before_its_body_arrives_which_is_dropped(length: str) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if "chunked" in length else BODY
        for _ in range(2):
            shut(frontend)
            writer.write(head_of(length))
            assert "connection" not in await refusal(reader)
            writer.write(body[:1000])
            await writer.drain()
            writer.write(body[1000:])
            frontend.inference.backpressure.active.clear()
            writer.write(head_of(length) + body)
            (await frontend.next_request())[1](internal("it came"), True)
            status, headers = await head(reader)
            assert status == 500
            await reader.readexactly(int(headers["content-length"]))
        assert frontend.inference.submitted.empty()
        assert frontend.inference.backpressure.rejected == 2
        writer.close()

    run(scenario)


def test_requests_that_were_sent_one_after_another_are_answered_in_their_order() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        request = head_of(f"Content-Length: {len(BODY)}") + BODY
        writer.write(request)
        _, answer = await frontend.next_request()
        shut(frontend)
        writer.write(request * 2)
        await asyncio.sleep(0)
        answer(internal("first"), True)
        assert (await head(reader))[0] == 500
        await reader.readexactly(len(b'{"error":"first"}'))
        await refusal(reader)
        await refusal(reader)
        writer.close()

    run(scenario)


def test_a_client_that_expects_100_continue_is_rejected_and_disconnected() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        shut(frontend)
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(head_of(f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert (await refusal(reader))["connection"] == "close"
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_a_pipelined_client_is_asked_for_its_body_only_behind_the_response_before() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        stream = head_of("Content-Length: 12", path="/v2/models/m/generate_stream") + b'{"text":"a"}'
        writer.write(stream + head_of(f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        _, answer = await frontend.next_request()
        answer(InferResponse("m", "1"), False)
        status, headers = await head(reader)
        assert (status, headers.get("transfer-encoding")) == (200, "chunked")
        answer(None, True)
        assert b"HTTP/1.1" not in await reader.readuntil(b"\r\n0\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        (await frontend.next_request())[1](internal("second"), True)
        assert (await head(reader))[0] == 500
        writer.close()

    run(scenario)


def test_a_connection_that_is_to_end_is_ended_when_the_body_has_come() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        shut(frontend)
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(head_of(f"Content-Length: {len(BODY)}", "Connection: close") + BODY[:-1])
        early = asyncio.create_task(refusal(reader))
        assert not (await asyncio.wait({early}, timeout=0.05))[0]
        writer.write(BODY[-1:])
        assert (await early)["connection"] == "close"
        assert await reader.read() == b""
        writer.close()

    run(scenario)


@pytest.mark.parametrize("piece", [b"64\r\n" + b" " * 100 + b"\r\n", b"1\r\n \r\n"])
def test_a_body_that_does_not_end_ends_the_connection(piece: bytes) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        shut(frontend)
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(head_of("Transfer-Encoding: chunked"))
        await refusal(reader)
        writer.write(piece * (MAX_CHUNKS + 1))
        with contextlib.suppress(ConnectionResetError):  # not everything that it sent was read
            assert await reader.read() == b""
        writer.close()

    run(scenario, input_size=100_000)


def test_requests_for_other_queues_get_their_own_error() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        shut(frontend)
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(head_of(f"Content-Length: {len(BODY)}", path="/v2/models/other/infer") + BODY)
        assert (await head(reader))[0] == 404
        writer.close()

    run(scenario)


def test_a_priority_depends_on_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    levels = {"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1}, "max_batch_size": 2}
    monkeypatch.setattr("tests.support.gateway.http_frontend.CONFIG", ModelConfig.model_validate({**config, **levels}))

    async def scenario(frontend: HttpFrontend) -> None:
        shut(frontend)
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(head_of(f"Content-Length: {len(BODY)}") + BODY)
        (await frontend.next_request())[1](internal("it came"), True)
        assert (await head(reader))[0] == 500
        writer.close()

    run(scenario)
