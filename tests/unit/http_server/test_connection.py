"""`HttpConnection` on its own, as the metrics port uses it: bounds, pipelining, ASGI responses, and disconnects."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.support.waiting import eventually
from weir.http_server import client_connection, connection
from weir.http_server.asgi import HttpExchange
from weir.http_server.client_connection import ConnectionLimits
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_cap import ConnectionCap
from weir.http_server.listeners import HttpListeners
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.core.errors import WeirError

INSTANT_BYTES = 16 << 20
SCRAPE = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def page(_request: Request) -> Response:
    return Response(b"page")


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def streamed(_request: Request) -> Response:
    async def chunks() -> Any:
        for chunk in (b"one", b"", b"three"):
            yield chunk

    return StreamingResponse(chunks())


async def broken(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
    await send({"type": "http.response.body", "body": b"four"})


async def silent(_scope: Any, _receive: Any, _send: Any) -> None:
    """Returns without a response."""


APP = Starlette(
    routes=[
        Route("/page", page),
        Route("/echo", echo, methods=["POST"]),
        Route("/streamed", streamed),
    ]
)


def run(
    scenario: Callable[[Connect, HttpListeners], Awaitable[None]],
    app: Any = APP,
    ledger: MemoryLedger | None = None,
    max_body_bytes: int = 1000,
    kind: type[HttpConnection] = HttpConnection,
    cap: ConnectionCap | None = None,
) -> None:
    async def serve() -> None:
        limits = ConnectionLimits(
            ledger=ledger or MemoryLedger(),
            arriving_slots=MemoryLedger(),
            cap=cap or ConnectionCap(100),
            max_body_bytes=max_body_bytes,
        )
        listeners = HttpListeners()
        listeners.bind("metrics", "127.0.0.1", 0)
        await listeners.serve("metrics", functools.partial(kind, app, limits))
        try:
            await scenario(lambda: asyncio.open_connection("127.0.0.1", listeners.port("metrics")), listeners)
        finally:
            listeners.stop("metrics", at_once=True)

    asyncio.run(asyncio.wait_for(serve(), 20))


@pytest.mark.parametrize(
    "begun", [b"GET /page HTTP/1.1\r\nX: ", b"POST /page HTTP/1.1\r\nContent-Length: 900000\r\n\r\n"]
)
def test_a_request_without_end_loses_its_connection_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 1000)

    async def scenario(connect: Connect, listeners: HttpListeners) -> None:
        endless_reader, endless = await connect()
        reader, scraper = await connect()
        for piece in (begun + b"x" * 1500, b"x" * 1500):
            endless.write(piece)
            await asyncio.sleep(0.02)
        assert (await endless_reader.read()).startswith(b"HTTP/1.1 40")
        while len(listeners.connections("metrics")) != 1:
            await asyncio.sleep(0.001)
        for _ in range(1000 // len(SCRAPE) + 2):
            scraper.write(SCRAPE)
            assert (await reader.readuntil(b"\r\n\r\npage")).startswith(b"HTTP/1.1 200")
        endless.close()
        scraper.close()

    run(scenario)


CHUNKED = b"POST /%b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("begun", [b"1\r\n{\r\n0\r\nX-Trailer: ", b"1\r\n{\r\n0\r\n", b"1\r\n{\r\n1;e="])
@pytest.mark.parametrize("path", [b"echo", b"page"], ids=["answered after", "answered before"])
def test_a_body_without_end_that_brings_nothing_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, begun: bytes, path: bytes
) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 3000)
    ledger = MemoryLedger()

    async def scenario(connect: Connect, listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(CHUNKED % path + begun)
        await writer.drain()
        if path == b"page":
            await reader.readuntil(b"Method Not Allowed")
        charged = 0
        filler = b"x" * 500 if begun[-2:] != b"\r\n" else b"x-name: value\r\n" * 33
        for _ in range(5):
            writer.write(filler)
            await asyncio.sleep(0.01)
            charged = max(charged, ledger.total_bytes)
        writer.write(3 * filler)
        rest = await reader.read()
        assert path == b"page" or rest.startswith(b"HTTP/1.1 400 ")
        assert path == b"page" or b"a trailer, or the extension of a chunk, exceeds 3000 bytes" in rest
        assert 500 <= charged <= 3000
        await eventually(lambda: not listeners.connections("metrics") and not ledger.total_bytes)
        writer.close()

    run(scenario, ledger=ledger)


def test_trailers_are_read_dropped_and_free_their_memory() -> None:
    ledger, seen = MemoryLedger(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.extend(scope["headers"])
        await Response(b"page")(scope, receive, send)

    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        for _ in range(3):
            for piece in (CHUNKED % b"echo", b"3\r\nabc\r\n0\r\nX-Sum: 1", b"2\r\nY: ", b"3\r\n", b"\r\n"):
                writer.write(piece)
                await asyncio.sleep(0.005)
            assert (await reader.readuntil(b"\r\n\r\npage")).startswith(b"HTTP/1.1 200")
            assert not ledger.total_bytes
        writer.close()

    run(scenario, app=app, ledger=ledger)
    assert {name for name, _ in seen} == {b"host", b"transfer-encoding"}


def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        bodies = [b"%d" % number for number in range(50)]
        for body in bodies:
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        for body in bodies:
            assert await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(body)) == body
        writer.close()

    run(scenario)


class InstantExchange:
    """Answers within the call that completes the request, with more than the buffers of a socket hold."""

    keep_alive = more_body = True
    response_complete = False
    received_bytes = 0

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    def start(self) -> None: ...

    def receive(self, data: bytes) -> None: ...

    def complete(self) -> None:
        self.response_complete = True
        self._connection.transport.write(b"i" * INSTANT_BYTES)
        self._connection.on_response_complete()

    def reject(self, error: WeirError, lingers: bool = False) -> None: ...

    def disconnect(self) -> None: ...


class InstantConnection(HttpConnection):
    def make_exchange(self, keep_alive: bool) -> HttpExchange:
        return InstantExchange(self) if self.url == b"/instant" else super().make_exchange(keep_alive)


def test_a_request_behind_a_response_that_is_not_read_is_served_once() -> None:
    served: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        await Response(scope["path"].encode())(scope, receive, send)

    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(b"".join(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"instant", b"a", b"b")))
        await asyncio.sleep(0.05)
        assert await reader.readexactly(INSTANT_BYTES)
        assert await reader.readuntil(b"\r\n\r\n/a")
        assert await reader.readuntil(b"\r\n\r\n/b")
        writer.write(b"GET /c HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"\r\n\r\n/c")
        assert served == ["/a", "/b", "/c"]
        writer.close()

    run(scenario, app, kind=InstantConnection)


def test_a_pipelined_request_whose_body_is_malformed_is_answered_with_400() -> None:
    go_on = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await Response(b"page")(scope, receive, send)

    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(SCRAPE + b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n")
        await asyncio.sleep(0.02)
        go_on.set()
        statuses = [line for line in (await reader.read()).split(b"\r\n") if b"HTTP/1.1" in line]
        assert [status.rpartition(b"HTTP/1.1 ")[2][:3] for status in statuses] == [b"200", b"400"]
        writer.close()

    run(scenario, waits)


def test_a_response_of_unknown_length_is_chunked() -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(b"GET /streamed HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert b"connection: close" in head
        assert body == b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"
        writer.close()

    run(scenario)


def test_a_head_request_has_the_head_alone() -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(b"HEAD /page HTTP/1.1\r\nHost: x\r\n\r\n" + SCRAPE)
        assert b"content-length: 4" in await reader.readuntil(b"\r\n\r\n")
        assert (await reader.readuntil(b"page")).startswith(b"HTTP/1.1 200")
        writer.close()

    run(scenario)


def test_a_client_that_waits_for_100_continue_gets_it_when_the_application_reads() -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()

    run(scenario)


@pytest.mark.parametrize("url", [b"/page?a=1", b"http://host/page", b"/%70age"])
def test_forms_of_a_url(url: bytes) -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % url)
        assert (await reader.readuntil(b"page")).startswith(b"HTTP/1.1 200")
        writer.close()

    run(scenario)


def test_a_malformed_url_is_answered_with_400() -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(b"GET http://:99999999/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()

    run(scenario)


def test_an_application_without_a_response_is_answered_with_500() -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(SCRAPE)
        assert (await reader.read()).startswith(b"HTTP/1.1 500")
        writer.close()

    run(scenario, silent)


def test_a_response_that_is_too_short_ends_the_connection() -> None:
    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(SCRAPE + SCRAPE)
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1
        writer.close()

    run(scenario, broken)


def test_the_application_learns_that_its_client_has_disconnected() -> None:
    messages: list[str] = []
    entered, done = asyncio.Event(), asyncio.Event()

    async def waits(_scope: Any, receive: Any, _send: Any) -> None:
        entered.set()
        while not messages or messages[-1] != "http.disconnect":
            messages.append((await receive())["type"])
        done.set()

    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        _, writer = await connect()
        writer.write(SCRAPE)
        await entered.wait()
        writer.close()
        await done.wait()
        assert messages == ["http.request", "http.disconnect"]

    run(scenario, waits)


def test_a_body_without_room_in_memory_is_answered_with_503_and_its_charge_released() -> None:
    ledger = MemoryLedger(20_000)

    async def scenario(connect: Connect, listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 50_000)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503")
        writer.close()
        while listeners.connections("metrics"):
            await asyncio.sleep(0.001)
        assert ledger.total_bytes == 0

    run(scenario, ledger=ledger, max_body_bytes=1 << 20)


def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_REQUEST_S", "KEEP_ALIVE_S"):
        monkeypatch.setattr(client_connection, name, 0.05)

    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(SCRAPE)
        assert await reader.readuntil(b"page")
        assert await reader.read() == b""
        writer.close()

    run(scenario)


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_that_never_sends_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(client_connection, "FIRST_REQUEST_S", 0.05)
    cap = ConnectionCap(100)

    async def scenario(connect: Connect, _listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(sent)
        assert await reader.read() == b""
        assert (cap.open, cap.ended["silent"]) == (0, 1)
        writer.close()

    run(scenario, cap=cap)


def test_a_connection_is_not_closed_within_a_head() -> None:
    async def scenario(connect: Connect, listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(SCRAPE[:10])
        for _ in range(3):
            (watched,) = await eventually(lambda: listeners.connections("metrics"))
            await eventually(lambda watched=watched: watched._is_in_head)
            watched._idle_since_s -= 100
            watched._check_idle()
            writer.write(SCRAPE[10:] + SCRAPE[:10])
            assert await reader.readuntil(b"page")
        writer.close()

    run(scenario)


def test_a_new_connection_takes_the_room_of_an_idle_one_and_never_that_of_a_busy_one() -> None:
    cap, go_on = ConnectionCap(4), asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await Response(b"late")(scope, receive, send)

    async def scenario(connect: Connect, listeners: HttpListeners) -> None:
        def served() -> int:
            return sum(one.has_served for one in listeners.connections("metrics"))

        silent, busy = await connect(), [await connect() for _ in range(2)]
        for _, writer in busy:
            writer.write(SCRAPE)
        await eventually(lambda: served() == 2)
        third = await connect()
        assert await silent[0].read() == b""
        third[1].write(SCRAPE)
        await eventually(lambda: served() == 3)
        reader, rejected = await connect()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1\r\n" in head
        assert b"too many connections" in await reader.read()
        go_on.set()
        for each, _ in (*busy, third):
            assert await each.readuntil(b"late")
        assert (cap.open, cap.ended) == (3, {"silent": 0, "displaced": 1, "rejected": 1})
        for writer in (silent[1], rejected, third[1], *(one for _, one in busy)):
            writer.close()
        await eventually(lambda: not cap.open)

    run(scenario, waits, cap=cap)


def test_stopped_listeners_close_idle_connections_and_response_open_requests() -> None:
    go_on = asyncio.Event()

    async def waits(_scope: Any, _receive: Any, send: Any) -> None:
        await go_on.wait()
        await Response(b"late")(_scope, _receive, send)

    async def scenario(connect: Connect, listeners: HttpListeners) -> None:
        reader, writer = await connect()
        writer.write(SCRAPE)
        while not listeners.connections("metrics"):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        idle_reader, idle = await connect()
        while len(listeners.connections("metrics")) < 2:
            await asyncio.sleep(0.001)
        listeners.stop("metrics")
        assert await idle_reader.read() == b""
        go_on.set()
        assert b"late" in await reader.read()
        await listeners.wait_closed()
        assert not listeners.connections("metrics")
        for each in (writer, idle):
            each.close()

    run(scenario, waits)
