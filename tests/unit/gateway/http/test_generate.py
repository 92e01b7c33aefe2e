"""The generate routes behind the real HTTP protocol, with responses as of a decoupled model."""

import asyncio
import contextlib
import json

import numpy as np
import pytest

from tests.support.gateway.http_frontend import HttpFrontend, chunk, head, run
from weir.calls.inference import call
from weir.gateway.http.events import WRONG_COUNT
from weir.schemas.core.errors import internal
from weir.schemas.core.requests import InferResponse
from weir.schemas.core.tensors import Tensor


def answer(text: str) -> InferResponse:
    return InferResponse("m", "1", outputs=[Tensor.from_numpy("out", np.array([text], object), "BYTES")])


def event(text: str) -> bytes:
    return b'data: {"model_name":"m","model_version":"1","out":"%b"}\n\n' % text.encode()


def test_each_response_is_an_event_at_once() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.post("generate_stream", {"text": "hello", "x": 1})
        request, on_response = await frontend.next_request()
        assert request.parameters == {"x": 1}
        for number in range(3):
            on_response(answer(str(number)), False)
            if not number:
                status, headers = await head(reader)
                assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
                assert headers["transfer-encoding"] == "chunked"
            assert await chunk(reader) == event(str(number))
        on_response(None, True)
        assert await chunk(reader) == b""
        writer.close()

    run(scenario)


def test_no_response_at_all() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.post("generate_stream", {"text": "hello"})
        (await frontend.next_request())[1](None, True)
        assert (await head(reader))[0] == 200
        assert await chunk(reader) == b""
        writer.close()

    run(scenario)


@pytest.mark.parametrize("before", [0, 2])
def test_an_error_sets_the_status_where_it_is_first(before: int) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.post("generate_stream", {"text": "hello"})
        _, on_response = await frontend.next_request()
        for _ in range(before):
            on_response(answer("a"), False)
        on_response(internal("no"), True)
        status, headers = await head(reader)
        assert (status, headers["content-type"]) == (200 if before else 500, "text/event-stream; charset=utf-8")
        for _ in range(before):
            assert await chunk(reader) == event("a")
        assert await chunk(reader) == b'data: {"error":"no"}\n\n'
        assert await chunk(reader) == b""
        writer.close()

    run(scenario)


def test_generate_requires_one_response() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.post("generate", {"text": "hello"})
        _, on_response = await frontend.next_request()
        on_response(answer("a"), False)
        on_response(answer("b"), False)
        status, headers = await head(reader)
        assert (status, headers["content-type"]) == (200, "application/json")
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert body == {"error": WRONG_COUNT}
        await frontend.inference.cancelled.wait()
        writer.close()

    run(scenario)


@pytest.mark.parametrize("name", ["generate", "generate_stream"])
@pytest.mark.parametrize("answers", [0, 1])
def test_a_client_that_disconnects_cancels_its_request(name: str, answers: int) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        _reader, writer = await frontend.post(name, {"text": "hello"})
        _, on_response = await frontend.next_request()
        for _ in range(answers):
            on_response(answer("a"), False)
        await asyncio.sleep(0)
        writer.transport.abort()
        await frontend.inference.cancelled.wait()

    run(scenario)


def test_a_client_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MAX_WAITING_BYTES", 1 << 20)

    async def scenario(frontend: HttpFrontend) -> None:
        reader, _writer = await frontend.post("generate_stream", {"text": "hello"})
        _, on_response = await frontend.next_request()
        sent = 0
        while not frontend.inference.cancelled.is_set():
            on_response(answer("x" * 50_000), False)
            await asyncio.sleep(0)
            sent += 1
            assert sent < 2000  # 100 MB, far more than the sockets and the bound hold
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = await reader.read()
        assert not received.endswith(b"0\r\n\r\n")

    run(scenario)


def test_a_body_beyond_the_limit() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, _writer = await frontend.post("generate", {"text": "x" * 2000})
        status, headers = await head(reader)
        assert status == 400
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert body["error"].startswith("request JSON size of ")
        assert body["error"].endswith(
            " exceeds the maximum allowed input size of 1000 bytes. Use --http-max-input-size to increase the limit."
        )
        assert await reader.read() == b""
        assert frontend.inference.submitted.empty()

    run(scenario, input_size=1000)


def test_a_deadline_is_passed_on_and_a_malformed_one_is_rejected() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        _, writer = await frontend.post("generate", {"text": "a"}, "Weir-Deadline-Ms: 1700000000123")
        assert (await frontend.next_request())[0].deadline_ms == 1_700_000_000_123
        writer.close()
        reader, writer = await frontend.post("generate", {"text": "a"}, "Weir-Deadline-Ms: soon")
        assert (await head(reader))[0] == 400
        writer.close()

    run(scenario)
