"""What the HTTP protocol bounds before anybody reads a body: its chunks, and its size on any route."""

import asyncio
import json
from typing import Any

import pytest
from http_door import Door, head, run

from gateway.http.protocol import MAX_CHUNKS

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
