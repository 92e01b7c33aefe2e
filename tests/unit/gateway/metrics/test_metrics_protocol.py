"""The metrics port keeps nothing of a request without end."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.listeners import Listeners
from gateway.metrics import protocol
from gateway.metrics.protocol import MetricsProtocol

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


async def page(_request: Request) -> Response:
    return Response(b"page")


@pytest.mark.parametrize(
    "begun", [b"GET /metrics HTTP/1.1\r\nX: ", b"POST /metrics HTTP/1.1\r\nContent-Length: 900000\r\n\r\n"]
)
def test_a_request_without_end_loses_its_connection_and_scrapes_go_on(
    monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(protocol, "MAX_REQUEST_BYTES", 1000)

    async def scenario() -> None:
        listeners = Listeners()
        listeners.take("metrics", "127.0.0.1", 0)
        app = Starlette(routes=[Route("/metrics", page, methods=["GET", "POST"])])
        async with asyncio.TaskGroup() as background:
            listeners.serve("metrics", app, MetricsProtocol, background)
            await listeners.started()
            port = listeners.port("metrics")
            _, endless = await asyncio.open_connection("127.0.0.1", port)
            reader, scraper = await asyncio.open_connection("127.0.0.1", port)
            endless.write(begun + b"x" * 2000)
            while len(listeners.connections("metrics")) != 1:
                await asyncio.sleep(0.001)
            for _ in range(1000 // len(SCRAPE) + 2):
                scraper.write(SCRAPE)
                assert (await reader.readuntil(b"\r\n\r\npage")).startswith(b"HTTP/1.1 200")
            endless.close()
            scraper.close()
            listeners.stop("metrics", at_once=True)

    asyncio.run(asyncio.wait_for(scenario(), 20))
