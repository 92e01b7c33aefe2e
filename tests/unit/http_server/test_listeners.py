"""Ports of the HTTP servers: bound at once, shared on request, and named in errors."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from weir.http_server.client_connection import ConnectionLimits
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_cap import ConnectionCap
from weir.http_server.listeners import HttpListeners
from weir.runtime.memory_ledger import MemoryLedger

LIMITS = ConnectionLimits(
    ledger=MemoryLedger(), arriving_slots=MemoryLedger(), cap=ConnectionCap(100), max_body_bytes=1000
)


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def test_a_port_in_use_is_named() -> None:
    first, second = HttpListeners(), HttpListeners()
    first.bind("HTTP", "127.0.0.1", 0)
    await first.serve("HTTP", functools.partial(HttpConnection, app, LIMITS))
    with pytest.raises(OSError, match=rf"HTTP can't listen on 127.0.0.1:{first.port('HTTP')}: "):
        second.bind("HTTP", "127.0.0.1", first.port("HTTP"))
    assert not second.has("HTTP")
    first.stop("HTTP", at_once=True)


async def test_a_port_is_shared_with_others_that_share_it() -> None:
    first, second = HttpListeners(), HttpListeners()
    first.bind("HTTP", "127.0.0.1", 0, reuse=True)
    second.bind("HTTP", "127.0.0.1", first.port("HTTP"), reuse=True)
    assert first.port("HTTP") == second.port("HTTP")
    for listeners in (first, second):
        await listeners.serve("HTTP", functools.partial(HttpConnection, app, LIMITS))
        listeners.stop("HTTP", at_once=True)


async def test_a_stopped_server_refuses_connections() -> None:
    listeners = HttpListeners()
    listeners.bind("HTTP", "127.0.0.1", 0)
    await listeners.serve("HTTP", functools.partial(HttpConnection, app, LIMITS))
    reader, writer = await asyncio.open_connection("127.0.0.1", listeners.port("HTTP"))
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 204 No Content\r\n")
    writer.close()
    port = listeners.port("HTTP")
    listeners.stop("HTTP")
    await asyncio.wait_for(listeners.wait_closed(), 5)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_what_is_not_served_has_no_connections() -> None:
    listeners = HttpListeners()
    assert listeners.connections("HTTP") == []
    listeners.stop("HTTP")
    await listeners.wait_disconnected("HTTP", 5)
    await listeners.wait_closed()
