"""What the HTTP protocol bounds before anybody reads a body: its chunks, and its size on any route."""

import asyncio
import json
from typing import Any

import pytest
from http_door import CONFIG, Door, head, run

from gateway.http.protocol import MAX_CHUNKS
from schemas.errors import internal
from schemas.model_config import ModelConfig

ROUTES = ["/v2/models/m/infer", "/v2/models/m/generate"]


async def read_error(reader: asyncio.StreamReader) -> tuple[int, str]:
    status, headers = await head(reader)
    assert headers["connection"] == "close"
    body: dict[str, Any] = json.loads(await reader.readexactly(int(headers["content-length"])))
    return status, body["error"]


def chunked(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize("path", ROUTES)
def test_too_many_chunks(path: str) -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(chunked(path) + b"1\r\n \r\n" * (MAX_CHUNKS + 1))
        text = "Chunked request body exceeds maximum of 65536 non-empty chunks."
        assert await read_error(reader) == (400, text)
        assert await reader.read() == b""
        assert door.inference.asked.empty()
        writer.close()

    run(scenario)


def test_just_as_many_chunks_as_there_may_be() -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        body = b'{"text":"a"}'
        spaces = b"1\r\n \r\n" * (MAX_CHUNKS - 1)
        writer.write(chunked(ROUTES[1]) + spaces + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        (await door.asked())[1](None, True)
        assert (await head(reader))[0] == 200
        writer.close()

    run(scenario)


def test_a_connection_counts_each_of_its_requests_anew() -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        for _ in range(3):
            spaces = b"1\r\n \r\n" * (MAX_CHUNKS // 2)
            writer.write(chunked(ROUTES[1]) + spaces + b'c\r\n{"text":"a"}\r\n0\r\n\r\n')
            (await door.asked())[1](None, True)
            status, headers = await head(reader)
            assert status == 200
            await reader.readexactly(int(headers["content-length"]))
        writer.close()

    run(scenario)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stated", [True, False])
def test_a_body_beyond_the_limit(path: str, stated: bool) -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        if stated:
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n".encode() + b" " * 2000)
        else:
            writer.write(chunked(path) + (b"64\r\n" + b" " * 100 + b"\r\n") * 20)
        status, text = await read_error(reader)
        assert status == 400
        assert text.startswith("request JSON size of ")
        assert " bytes exceeds the maximum allowed input size of 1000 bytes. Use --http-max-input-size" in text
        assert await reader.read() == b""
        assert door.inference.asked.empty()
        writer.close()

    run(scenario, input_size=1000)


def test_a_client_that_reads_no_answers_has_no_more_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, answer = 60, internal("x" * 300_000)
    one_answer = ModelConfig.model_validate({**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}})
    monkeypatch.setattr("http_door.CONFIG", one_answer)

    async def scenario(door: Door) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=1 << 16)
        body = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":["a"]}]}'
        head_lines = f"POST {ROUTES[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write((head_lines + body) * requests)
        answered = 0
        try:
            while answered < requests:
                (await asyncio.wait_for(door.asked(), 0.3))[1](answer, True)
                answered += 1
        except TimeoutError:
            pass  # it waits for its client
        assert 0 < answered < requests

        async def answer_the_rest() -> None:
            for _ in range(requests - answered):
                (await door.asked())[1](answer, True)

        answering = asyncio.create_task(answer_the_rest())
        for _ in range(requests):
            status, headers = await head(reader)
            assert status == 500
            await reader.readexactly(int(headers["content-length"]))
        await answering
        writer.close()

    run(scenario)
