"""The infer route and the bounds of HTTP bodies: chunks, sizes, order, and unexpected exceptions."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.gateway.http_frontend import CONFIG, HttpFrontend, head, run
from weir.gateway.http import protocol
from weir.gateway.http.protocol import MAX_CACHED_ROUTES, parse_route
from weir.http_server.connection import MAX_CHUNKS
from weir.runtime.containment import SITES
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal

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
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(chunked(path) + b"1\r\n \r\n" * (MAX_CHUNKS + 1))
        text = "Chunked request body exceeds maximum of 65536 non-empty chunks."
        assert await read_error(reader) == (400, text)
        assert await reader.read() == b""
        assert frontend.inference.submitted.empty()
        writer.close()

    run(scenario)


def test_just_as_many_chunks_as_there_may_be() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        body = b'{"text":"a"}'
        spaces = b"1\r\n \r\n" * (MAX_CHUNKS - 1)
        writer.write(chunked(ROUTES[1]) + spaces + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        (await frontend.next_request())[1](None, True)
        assert (await head(reader))[0] == 200
        writer.close()

    run(scenario)


def test_a_connection_counts_each_request_separately() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        for _ in range(3):
            spaces = b"1\r\n \r\n" * (MAX_CHUNKS // 2)
            writer.write(chunked(ROUTES[1]) + spaces + b'c\r\n{"text":"a"}\r\n0\r\n\r\n')
            (await frontend.next_request())[1](None, True)
            status, headers = await head(reader)
            assert status == 200
            await reader.readexactly(int(headers["content-length"]))
        writer.close()

    run(scenario)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stated", [True, False])
def test_a_body_beyond_the_limit(path: str, stated: bool) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        if stated:
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n".encode() + b" " * 2000)
        else:
            writer.write(chunked(path) + (b"64\r\n" + b" " * 100 + b"\r\n") * 20)
        status, text = await read_error(reader)
        assert status == 400
        assert text.startswith("request JSON size of ")
        assert " bytes exceeds the maximum allowed input size of 1000 bytes. Use --http-max-input-size" in text
        assert await reader.read() == b""
        assert frontend.inference.submitted.empty()
        writer.close()

    run(scenario, input_size=1000)


def test_a_client_that_reads_no_responses_has_no_more_requests_started(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, answer = 60, internal("x" * 300_000)
    single_response = ModelConfig.model_validate(
        {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    )
    monkeypatch.setattr("tests.support.gateway.http_frontend.CONFIG", single_response)

    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port, limit=1 << 16)
        body = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":["a"]}]}'
        head_lines = f"POST {ROUTES[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write((head_lines + body) * requests)
        answered = 0
        try:
            while answered < requests:
                (await asyncio.wait_for(frontend.next_request(), 0.3))[1](answer, True)
                answered += 1
        except TimeoutError:
            pass  # it waits for its client
        assert 0 < answered < requests

        async def answer_the_rest() -> None:
            for _ in range(requests - answered):
                (await frontend.next_request())[1](answer, True)

        answering = asyncio.create_task(answer_the_rest())
        for _ in range(requests):
            status, headers = await head(reader)
            assert status == 500
            await reader.readexactly(int(headers["content-length"]))
        await answering
        writer.close()

    run(scenario)


INFER_BODY = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":["a"]}]}'
UNKNOWN_MODEL = b"POST /v2/models/absent/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def infer(*lines: str, body: bytes = INFER_BODY) -> bytes:
    head_lines = [f"POST {ROUTES[0]} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head_lines).encode("latin-1") + body


@pytest.fixture
def single_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model answers each request once, so the infer route serves it."""
    config = ModelConfig.model_validate({**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}})
    monkeypatch.setattr("tests.support.gateway.http_frontend.CONFIG", config)


async def read_response(reader: asyncio.StreamReader) -> tuple[int, Any]:
    status, headers = await head(reader)
    return status, json.loads(await reader.readexactly(int(headers["content-length"])))


@pytest.mark.usefixtures("single_response")
def test_pipelined_rejections_do_not_run_inside_the_response_before_them() -> None:
    """Each rejection used to start the next request recursively, 1 000 calls deep."""
    count = 3000

    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port, limit=1 << 16)
        writer.write(infer() + UNKNOWN_MODEL * count)
        _, on_response = await frontend.next_request()
        for _ in range(3):  # all that one read from the socket may bring is queued by now
            await asyncio.sleep(0.02)
        on_response(internal("the first"), True)  # raises nothing: other responses of its message come after it
        assert await read_response(reader) == (500, {"error": "the first"})
        for _ in range(count):
            assert (await read_response(reader))[0] == 404
        writer.close()

    run(scenario)


@pytest.mark.parametrize("length", ["²", "9" * 5000, "-" + "1" * 30])
@pytest.mark.usefixtures("single_response")
def test_a_header_length_that_is_no_number_ends_its_own_request_alone(length: str) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port, limit=1 << 16)
        writer.write(infer() + infer(f"Inference-Header-Content-Length: {length}") + infer())
        (await frontend.next_request())[1](internal("the first"), True)
        assert await read_response(reader) == (500, {"error": "the first"})
        status, body = await read_response(reader)
        assert status == 400
        assert body["error"].startswith("Unable to parse Inference-Header-Content-Length, got: ")
        assert len(body["error"]) < 300
        (await frontend.next_request())[1](internal("the third"), True)
        assert await read_response(reader) == (500, {"error": "the third"})
        writer.close()

    run(scenario)


@pytest.mark.parametrize("method", ["open", "on_response"])
@pytest.mark.usefixtures("single_response")
def test_an_unexpected_exception_is_answered_with_500(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SITES[f"weir.calls.inference.call:Call.{method}"]
    calls = iter([False, True, False])  # the second of three requests meets it

    def raises_once(*arguments: Any) -> Any:
        if next(calls):
            raise RuntimeError("injected")
        return function(*arguments)

    function = site.function
    monkeypatch.setattr(site, "function", raises_once)

    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(infer() * 3)
        answers = []
        for number in range(3):
            if number != 1 or method == "on_response":
                (await frontend.next_request())[1](internal("expected"), True)
            answers.append(await read_response(reader))
        expected, unexpected = (500, {"error": "expected"}), (500, {"error": "internal server error"})
        assert answers == [expected, unexpected, expected]
        writer.close()

    run(scenario)


@pytest.mark.usefixtures("single_response")
def test_a_malformed_request_is_answered_in_json_after_those_before_it() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(infer() + b"\0\0\0\r\n\r\n")
        _, on_response = await frontend.next_request()
        await asyncio.sleep(0.05)
        on_response(internal("the first"), True)
        assert await read_response(reader) == (500, {"error": "the first"})
        status, text = await read_error(reader)
        assert (status, text.startswith("malformed HTTP request: ")) == (400, True)
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_a_malformed_request_alone_is_answered_in_json() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        for request in (b"nothing\r\n\r\n", b"GET /v2 HTTP/1.1\r\nHo st: x\r\n\r\n", infer() + b"\0\0\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
            writer.write(request)
            if request.startswith(b"POST"):
                assert (await head(reader))[0] == 501  # the model is decoupled
                await reader.readuntil(b"}")
            status, text = await read_error(reader)
            assert (status, text.startswith("malformed HTTP request: ")) == (400, True)
            writer.close()

    run(scenario)


@pytest.mark.usefixtures("single_response")
def test_a_request_to_switch_protocols_is_served_as_it_is() -> None:
    """Clients that prefer HTTP/2 send such requests. The parser expects no body of them."""

    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.open()
        upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"
        writer.write(f"GET /nothing HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n\r\n".encode() + infer())
        assert (await read_response(reader))[0] == 404
        (await frontend.next_request())[1](internal("behind it"), True)
        assert await read_response(reader) == (500, {"error": "behind it"})
        writer.close()

    run(scenario)


@pytest.mark.usefixtures("single_response")
def test_thousands_of_requests_to_switch_protocols_do_not_run_inside_each_other() -> None:
    count = 3000

    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.open()
        writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" * count + infer())
        for _ in range(count):
            assert (await read_response(reader))[0] == 404
        (await frontend.next_request())[1](internal("behind them"), True)
        assert await read_response(reader) == (500, {"error": "behind them"})
        writer.close()

    run(scenario)


@pytest.mark.usefixtures("single_response")
@pytest.mark.parametrize("before", [0, 1])
def test_an_exception_while_a_head_is_read_is_answered_with_500(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("injected")

    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.open()
        for _ in range(before):
            writer.write(infer())
            (await frontend.next_request())[1](internal("before"), True)
            assert await read_response(reader) == (500, {"error": "before"})
        monkeypatch.setattr(protocol, "InferExchange", Raises)
        writer.write(infer())
        assert await read_error(reader) == (500, "internal server error")
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_urls_that_no_client_repeats_are_not_remembered() -> None:
    routes: dict[bytes, tuple[str, str] | None] = {}
    for number in range(3 * MAX_CACHED_ROUTES):
        parse_route(routes, b"/v2/models/m/infer?%d" % number)
        parse_route(routes, b"/v2/models/m/infer?%d" % number + b"a" * 60_000)
    assert len(routes) <= MAX_CACHED_ROUTES
    assert max(map(len, routes)) <= 256
    parse_route(routes, b"/v2/models/m%20n/versions/02/infer")
    assert routes[b"/v2/models/m%20n/versions/02/infer"] == ("m n", "2")  # a new one is still cached


@pytest.mark.usefixtures("single_response")
def test_a_raw_input_beyond_the_limit_has_a_text_of_its_own() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.open()
        writer.write(infer("Inference-Header-Content-Length: 0", body=b" " * 2000))
        text = "Raw input has a byte_size (2000 bytes) that exceeds the maximum allowed value of 1000 bytes. "
        assert await read_error(reader) == (400, text + "Use --http-max-input-size to increase the limit.")
        writer.close()

    run(scenario, input_size=1000)


@pytest.mark.usefixtures("single_response")
def test_open_connections_are_served_once_more_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.3)

    async def scenario(frontend: HttpFrontend) -> None:
        busy, idle, late = [await frontend.open() for _ in range(3)]
        for _, writer in (busy, late):
            writer.write(infer())
        for _ in (busy, late):
            (await frontend.next_request())[1](internal("before"), True)
        for reader, _ in (busy, late):
            assert (await head(reader))[1].get("connection") is None
            await reader.readuntil(b"}")
        busy[1].write(infer())
        _, on_response = await frontend.next_request()
        frontend.listeners.stop("HTTP")
        while True:  # until the port is closed
            try:
                _, refused = await frontend.open()
                refused.close()
                await asyncio.sleep(0)
            except ConnectionError:
                break
        on_response(internal("meanwhile"), True)
        assert await read_error(busy[0]) == (500, "meanwhile")
        late[1].write(infer())
        (await frontend.next_request())[1](internal("after"), True)
        assert await read_error(late[0]) == (500, "after")
        for reader, writer in (busy, idle, late):
            assert await reader.read() == b""
            writer.close()
        await frontend.listeners.wait_disconnected("HTTP", 5)

    run(scenario)
