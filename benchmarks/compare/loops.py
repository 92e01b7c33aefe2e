"""The load generator of `weir perf`, for machines without wrk or h2load. It takes CPU from the server it measures."""

from __future__ import annotations

import asyncio
import time

import uvloop

from benchmarks.compare.payload import Payload
from benchmarks.compare.targets import Protocol
from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.grpc import GrpcClient
from weir.perf.clients.http import HttpClient
from weir.perf.measurement.distribution import Window
from weir.perf.measurement.loops import ClosedLoop

_LIMIT_S = 30.0


def run(address: str, payload: Payload, in_flight: int, seconds: float) -> Window:
    """What became of the requests, which end somewhat after so many seconds: all of them are answered."""
    return uvloop.run(_run(ServerAddress.parse(address), payload, in_flight, seconds))


async def _run(address: ServerAddress, payload: Payload, in_flight: int, seconds: float) -> Window:
    client: HttpClient | GrpcClient
    if payload.protocol is Protocol.GRPC:
        client = GrpcClient(address, "", "", {}, _LIMIT_S)
        client.load_messages([payload.body])
    else:
        client = HttpClient(address, payload.path, payload.headers, _LIMIT_S)
        client.load_bodies([payload.body])
    loop = ClosedLoop(client, 1, None, False, in_flight)
    async with asyncio.TaskGroup() as group:
        loop.start(group)
        await asyncio.sleep(seconds)
        unanswered = await loop.stop(_LIMIT_S)
    await client.close()
    loop.window.end(time.perf_counter())
    if unanswered:
        loop.window.failure("no response", unanswered)
    return loop.window
