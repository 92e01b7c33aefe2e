"""A load generator for machines without wrk or h2load. It takes CPU from the server, so figures are worse with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import httptools
import uvloop

from benchmarks.compare.payload import Payload
from benchmarks.compare.targets import Protocol

_LIMIT_S = 30.0


def run(address: str, payload: Payload, in_flight: int, seconds: float) -> tuple[list[float], int, float]:
    """(latencies of the answered requests in seconds, how many were refused, seconds it lasted)."""
    latencies: list[float] = []

    async def loop() -> int:
        stop = time.perf_counter() + seconds
        drive: Callable[..., Coroutine[Any, Any, int]] = _grpc if payload.protocol is Protocol.GRPC else _http
        async with asyncio.timeout(seconds + _LIMIT_S):
            return await drive(address, payload, in_flight, stop, latencies)

    began = time.perf_counter()
    refused = uvloop.run(loop())
    return latencies, refused, time.perf_counter() - began


async def _grpc(address: str, payload: Payload, in_flight: int, stop: float, latencies: list[float]) -> int:
    refused = 0
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(payload.path)

        async def stream() -> None:
            nonlocal refused
            while (began := time.perf_counter()) < stop:
                try:
                    await call(payload.body)
                    latencies.append(time.perf_counter() - began)
                except grpc.aio.AioRpcError:
                    refused += 1

        await asyncio.gather(*(stream() for _ in range(in_flight)))
    return refused


async def _http(address: str, payload: Payload, in_flight: int, stop: float, latencies: list[float]) -> int:
    headers = payload.headers | {"Host": address, "Content-Length": str(len(payload.body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"POST {payload.path} HTTP/1.1\r\n{lines}\r\n".encode() + payload.body
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    pairs = [
        await loop.create_connection(lambda: _Connection(request, stop, latencies), host, int(port))
        for _ in range(in_flight)
    ]
    return sum(await asyncio.gather(*(connection.finished for _, connection in pairs)))


class _Connection(asyncio.Protocol):
    """One of the HTTP connections; `finished` is done with the number of refused requests."""

    def __init__(self, request: bytes, stop: float, latencies: list[float]) -> None:
        self._request = request
        self._stop = stop
        self._latencies = latencies
        self._refused = 0
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        now = time.perf_counter()
        if self._parser.get_status_code() == 200:
            self._latencies.append(now - self._began)
        else:
            self._refused += 1
        if now < self._stop:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_result(self._refused + (error is not None))

    def _send(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._began = time.perf_counter()
        self._transport.write(self._request)
