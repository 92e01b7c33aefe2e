"""A request to a queue that is known to be shut is answered by its head alone; its connection goes on."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from http_door import CONFIG, Door, head, run

from gateway.http.protocol import MAX_CHUNKS
from schemas.errors import internal, overloaded
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest

BODY = json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a" * 2000]}]}).encode()


@pytest.fixture(autouse=True)
def _one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    monkeypatch.setattr("http_door.CONFIG", ModelConfig.model_validate(config))


def shut(door: Door) -> None:
    door.inference.shut.learn(1e12, "m", InferRequest("m"), overloaded(wait_us=3e6, shut_us=1_000_000))


def head_of(*lines: str, path: str = "/v2/models/m/infer") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


async def refusal(reader: asyncio.StreamReader) -> dict[str, str]:
    status, headers = await head(reader)
    assert (status, headers["retry-after"]) == (503, "3")
    body: Any = await reader.readexactly(int(headers["content-length"]))
    assert json.loads(body) == {"error": "Exceeds maximum queue size"}
    return headers


@pytest.mark.parametrize("length", [f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"])
def test_it_is_answered_before_its_body_comes_which_is_passed_over(length: str) -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if "chunked" in length else BODY
        for _ in range(2):
            shut(door)
            writer.write(head_of(length))
            assert "connection" not in await refusal(reader)
            writer.write(body[:1000])
            await writer.drain()
            writer.write(body[1000:])
            door.inference.shut.known.clear()
            writer.write(head_of(length) + body)
            (await door.asked())[1](internal("it came"), True)
            status, headers = await head(reader)
            assert status == 500
            await reader.readexactly(int(headers["content-length"]))
        assert door.inference.asked.empty()
        assert door.inference.shut.turned_away == 2
        writer.close()

    run(scenario)


def test_requests_that_were_sent_one_after_another_are_answered_in_their_order() -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        request = head_of(f"Content-Length: {len(BODY)}") + BODY
        writer.write(request)
        _, answer = await door.asked()
        shut(door)
        writer.write(request * 2)
        await asyncio.sleep(0)
        answer(internal("first"), True)
        assert (await head(reader))[0] == 500
        await reader.readexactly(len(b'{"error":"first"}'))
        await refusal(reader)
        await refusal(reader)
        writer.close()

    run(scenario)


def test_a_client_that_waits_to_be_told_to_go_on_is_refused_and_sent_away() -> None:
    async def scenario(door: Door) -> None:
        shut(door)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(head_of(f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert (await refusal(reader))["connection"] == "close"
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_a_connection_that_is_to_end_is_ended_when_the_body_has_come() -> None:
    async def scenario(door: Door) -> None:
        shut(door)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
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
    async def scenario(door: Door) -> None:
        shut(door)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(head_of("Transfer-Encoding: chunked"))
        await refusal(reader)
        writer.write(piece * (MAX_CHUNKS + 1))
        with contextlib.suppress(ConnectionResetError):  # what it sent was not all read
            assert await reader.read() == b""
        writer.close()

    run(scenario, input_size=100_000)


def test_what_is_not_for_that_queue_is_told_its_own_error() -> None:
    async def scenario(door: Door) -> None:
        shut(door)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(head_of(f"Content-Length: {len(BODY)}", path="/v2/models/other/infer") + BODY)
        assert (await head(reader))[0] == 404
        writer.close()

    run(scenario)


def test_a_priority_is_told_by_the_body_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    levels = {"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1}, "max_batch_size": 2}
    monkeypatch.setattr("http_door.CONFIG", ModelConfig.model_validate({**config, **levels}))

    async def scenario(door: Door) -> None:
        shut(door)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(head_of(f"Content-Length: {len(BODY)}") + BODY)
        (await door.asked())[1](internal("it came"), True)
        assert (await head(reader))[0] == 500
        writer.close()

    run(scenario)
