"""The HTTP client against a server whose bytes the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.http import HttpClient, http_head
from weir.perf.clients.session import CallFailed

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

Serve = Callable[[bytes], bytes | None]
"""The bytes for one request; None closes the connection, b"" leaves the request without a response."""


class RawServer:
    """Counts connections and requests; each request is a head and a body of its content length."""

    def __init__(self, serve: Serve) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self._serve = serve
        self.address = ServerAddress("127.0.0.1", 0)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self._serve(self.requests[-1])
                if answer is None:
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[RawServer]:
    raw = RawServer(serve)
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    raw.address = ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield raw
    finally:
        server.close()


def client_of(raw: RawServer, timeout_s: float = 10.0) -> HttpClient:
    client = HttpClient(raw.address, "/v2/models/m/infer", {"X-Own": "1"}, timeout_s)
    client.load_bodies([b"one", b"two"])
    return client


async def test_requests_of_a_session_share_a_connection() -> None:
    async with serving(lambda request: OK) as raw:
        session = client_of(raw).session()
        answers = [await session.infer(number % 2, None) for number in range(4)]
        await session.close()
        assert raw.connections == 1
    assert [request[-3:] for request in raw.requests] == [b"one", b"two"] * 2
    assert raw.requests[0].startswith(b"POST /v2/models/m/infer HTTP/1.1\r\n")
    assert b"X-Own: 1\r\n" in raw.requests[0]
    assert all(len(answer.responses_s) == 1 for answer in answers)
    assert [answer.end_s for answer in answers] == sorted(answer.end_s for answer in answers)


async def test_an_error_is_reported_in_the_servers_words() -> None:
    error = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 16\r\n\r\n{"error": "bad"}'
    async with serving(lambda request: error) as raw:
        session = client_of(raw).session()
        with pytest.raises(CallFailed, match=r"^bad$") as failure:
            await session.infer(0, None)
        assert not failure.value.is_connection
        await session.close()


async def test_an_error_without_a_text_is_reported_by_its_status() -> None:
    async with serving(lambda request: b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\nnope") as raw:
        session = client_of(raw).session()
        with pytest.raises(CallFailed, match=r"^HTTP status 502: nope$"):
            await session.infer(0, None)
        await session.close()


async def test_a_response_in_chunks_is_one_answer() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
    async with serving(lambda request: chunked) as raw:
        client = client_of(raw)
        session = client.session()
        reply = await session.exchange(client.chunks(0, None), keeps_body=True)
        assert (reply.status, reply.body) == (200, b"{}")
        assert len((await session.infer(0, None)).responses_s) == 1
        await session.close()


async def test_a_session_connects_again_after_the_server_has_closed_its_connection() -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    async with serving(lambda request: closing) as raw:
        session = client_of(raw).session()
        for _ in range(2):
            await session.infer(0, None)
        await session.close()
        assert raw.connections == 2


async def test_a_lost_connection_fails_the_request_and_not_the_next_one() -> None:
    answers = iter([None, OK])
    async with serving(lambda request: next(answers)) as raw:
        session = client_of(raw).session()
        with pytest.raises(CallFailed, match="closed the connection") as failure:
            await session.infer(0, None)
        assert failure.value.is_connection
        await session.infer(0, None)
        await session.close()
        assert raw.connections == 2


async def test_bytes_that_are_not_http_fail_the_request() -> None:
    async with serving(lambda request: b"hello\r\n\r\n") as raw:
        session = client_of(raw).session()
        with pytest.raises(CallFailed, match="not HTTP"):
            await session.infer(0, None)
        await session.close()


async def test_a_request_without_a_response_fails_after_its_time() -> None:
    answers = iter([OK, b"", OK])
    async with serving(lambda request: next(answers)) as raw:
        session = client_of(raw, timeout_s=0.05).session()
        await session.infer(0, None)
        with pytest.raises(CallFailed, match=r"no response within 0\.05 s"):
            await session.infer(0, None)
        await session.infer(0, None)  # on a new connection: a late response would be taken for its own
        await session.close()
        assert raw.connections == 2


async def test_a_server_that_does_not_listen_is_a_failed_connection() -> None:
    async with serving(lambda request: OK) as raw:
        address = raw.address
    client = HttpClient(address, "/", {}, 5.0)
    client.load_bodies([b""])
    with pytest.raises(CallFailed, match="Errno 111") as failure:
        await client.session().infer(0, None)
    assert failure.value.is_connection


def test_a_header_of_two_lines_is_rejected() -> None:
    with pytest.raises(ValueError, match="'X' must be one line"):
        http_head(ServerAddress("h", 1), "GET", "/", {"X": "1\r\nEvil: 2"}, 0)


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("localhost:8000", ServerAddress("localhost", 8000), "localhost:8000"),
        ("http://h:1/base/", ServerAddress("h", 1, False, "/base"), "h:1"),
        ("https://h:443", ServerAddress("h", 443, True), "h:443"),
        ("grpcs://h:8001", ServerAddress("h", 8001, True), "h:8001"),
        ("[::1]:8000", ServerAddress("::1", 8000), "[::1]:8000"),
    ],
)
def test_addresses(text: str, address: ServerAddress, shown: str) -> None:
    assert ServerAddress.parse(text) == address
    assert str(address) == shown


@pytest.mark.parametrize("text", ["", "localhost", "h:port", "h:99999", "ftp://h:1", ":8000"])
def test_what_is_no_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be host:port"):
        ServerAddress.parse(text)
