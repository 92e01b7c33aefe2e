"""The generate routes behind the real HTTP protocol, with an inference that answers as a decoupled model may."""

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from gateway import generation, main
from gateway.catalog import ServedModel
from gateway.doors import Doors
from gateway.http.app import make_app
from gateway.http.protocol import HttpProtocol
from gateway.inference import OnAnswer
from schemas.errors import internal, not_found
from schemas.model_config import ModelConfig
from schemas.request_limits import RequestLimits
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import Tensor

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
        self.asked: asyncio.Queue[tuple[InferRequest, OnAnswer]] = asyncio.Queue()
        self.abandoned = asyncio.Event()

    def submit(self, request: InferRequest, on_answer: OnAnswer, _slot: Any = None) -> object:
        self.asked.put_nowait((request, on_answer))
        return object()

    def abandon(self, _pending: object) -> None:
        self.abandoned.set()


class Door:
    """A running server with an inference, and connections to it."""

    def __init__(self, port: int, inference: FakeInference) -> None:
        self.port = port
        self.inference = inference

    async def ask(self, name: str, document: Any, *lines: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)
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


def run(scenario: Callable[[Door], Awaitable[None]], input_size: int = 1 << 20) -> None:
    async def serve() -> None:
        inference = FakeInference()
        limits = RequestLimits(input_size=input_size)
        doors = Doors(OneModel(), inference, None, limits, "triton")  # type: ignore[arg-type]
        server = main._server(make_app(doors), functools.partial(HttpProtocol, doors, {}))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            try:
                await asyncio.wait_for(scenario(Door(listener.getsockname()[1], inference)), 10)
            finally:
                server.should_exit = server.force_exit = True
                await serving

    asyncio.run(serve())


def answer(text: str) -> InferResponse:
    return InferResponse("m", "1", outputs=[Tensor.from_numpy("out", np.array([text], object), "BYTES")])


def event(text: str) -> bytes:
    return b'data: {"model_name":"m","model_version":"1","out":"%b"}\n\n' % text.encode()


def test_each_answer_is_an_event_at_once() -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await door.ask("generate_stream", {"text": "hello", "x": 1})
        request, on_answer = await door.asked()
        assert request.parameters == {"x": 1}
        for number in range(3):
            on_answer(answer(str(number)), False)
            if not number:
                status, headers = await head(reader)
                assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
                assert headers["transfer-encoding"] == "chunked"
            assert await chunk(reader) == event(str(number))
        on_answer(None, True)
        assert await chunk(reader) == b""
        writer.close()

    run(scenario)


def test_no_answer_at_all() -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await door.ask("generate_stream", {"text": "hello"})
        (await door.asked())[1](None, True)
        assert (await head(reader))[0] == 200
        assert await chunk(reader) == b""
        writer.close()

    run(scenario)


@pytest.mark.parametrize("before", [0, 2])
def test_an_error_sets_the_status_where_it_is_first(before: int) -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await door.ask("generate_stream", {"text": "hello"})
        _, on_answer = await door.asked()
        for _ in range(before):
            on_answer(answer("a"), False)
        on_answer(internal("no"), True)
        status, headers = await head(reader)
        assert (status, headers["content-type"]) == (200 if before else 500, "text/event-stream; charset=utf-8")
        for _ in range(before):
            assert await chunk(reader) == event("a")
        assert await chunk(reader) == b'data: {"error":"no"}\n\n'
        assert await chunk(reader) == b""
        writer.close()

    run(scenario)


def test_generate_wants_one_answer() -> None:
    async def scenario(door: Door) -> None:
        reader, writer = await door.ask("generate", {"text": "hello"})
        _, on_answer = await door.asked()
        on_answer(answer("a"), False)
        on_answer(answer("b"), False)
        status, headers = await head(reader)
        assert (status, headers["content-type"]) == (200, "application/json")
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert body == {"error": generation.WRONG_COUNT}
        await door.inference.abandoned.wait()
        writer.close()

    run(scenario)


@pytest.mark.parametrize("name", ["generate", "generate_stream"])
@pytest.mark.parametrize("answers", [0, 1])
def test_a_client_that_leaves_abandons_its_request(name: str, answers: int) -> None:
    async def scenario(door: Door) -> None:
        _reader, writer = await door.ask(name, {"text": "hello"})
        _, on_answer = await door.asked()
        for _ in range(answers):
            on_answer(answer("a"), False)
        await asyncio.sleep(0)
        writer.transport.abort()
        await door.inference.abandoned.wait()

    run(scenario)


def test_a_client_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_UNREAD_BYTES", 1 << 20)

    async def scenario(door: Door) -> None:
        reader, _writer = await door.ask("generate_stream", {"text": "hello"})
        _, on_answer = await door.asked()
        sent = 0
        while not door.inference.abandoned.is_set():
            on_answer(answer("x" * 50_000), False)
            await asyncio.sleep(0)
            sent += 1
            assert sent < 2000  # 100 MB, far more than the sockets and the bound hold
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = await reader.read()
        assert not received.endswith(b"0\r\n\r\n")

    run(scenario)


def test_a_body_beyond_the_limit() -> None:
    async def scenario(door: Door) -> None:
        reader, _writer = await door.ask("generate", {"text": "x" * 2000})
        status, headers = await head(reader)
        assert status == 400
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert body["error"].startswith("request JSON size of ")
        assert body["error"].endswith(
            " exceeds the maximum allowed input size of 1000 bytes. Use --http-max-input-size to increase the limit."
        )
        assert await reader.read() == b""
        assert door.inference.asked.empty()

    run(scenario, input_size=1000)
