"""The section of gateway processes on one port: requests a second of an identity model of 64 bytes, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import weir
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Section

BACKEND = """
from weir.backend import ArrayBackend

class Backend(ArrayBackend):
    def open(self, model):
        return lambda inputs: {"OUTPUT": inputs["INPUT"]}
"""

CONFIG = """
backend: "same"
max_batch_size: 256
dynamic_batching { }
input [{ name: "INPUT" data_type: TYPE_FP32 dims: [16] }]
output [{ name: "OUTPUT" data_type: TYPE_FP32 dims: [16] }]
instance_group [{ count: 2 kind: KIND_CPU }]
"""

STARLETTE = """
import socket
import sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

async def same(request):
    body = await request.body()
    return Response(body, media_type="application/octet-stream")

app = Starlette(routes=[Route("/v2/models/{model}/infer", same, methods=["POST"])])
config = uvicorn.Config(app, log_level="warning", access_log=False)
# As a socket and not as a number: uvicorn takes the latter for a Unix socket, without TCP_NODELAY.
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
"""

CONNECTIONS = 32
"""Of each process of clients."""


def gateways(plan: Plan) -> Section:
    """Requests a second by the number of gateways, and of a bare Starlette."""
    section = Section(
        "gateways",
        "Gateway processes on one port",
        "Requests a second of an identity model with 64 bytes in and out, binary over HTTP, by the number of "
        "gateways. Clients and "
        f"servers share {os.cpu_count()} processors. Starlette with uvicorn, one process, returns the body "
        f"without a model.",
        ("server", "processes", "requests/s", "p50 ms"),
    )
    folder = plan.folder / "gateways"
    (folder / "same" / "1").mkdir(parents=True)
    (folder / "same" / "config.pbtxt").write_text(CONFIG)
    (folder / "same" / "backend.py").write_text(BACKEND)
    clients = max(1, (os.cpu_count() or 1) // 4)
    for count in plan.gateways:
        if not plan.has_time:
            section.note("The time was over before all rows were measured.")
            return section
        with weir.Server(folder, start_timeout_s=300, gateways=count, allow_http=True) as server:
            rate, p50_ms = measure(server.http_url.removeprefix("http://"), clients, plan.seconds)
        section.add("Weir", count, f"{rate:.0f}", p50_ms)
    with starlette() as address:
        rate, p50_ms = measure(address, clients, plan.seconds)
    section.add("Starlette", 1, f"{rate:.0f}", p50_ms)
    return section


@contextlib.contextmanager
def starlette() -> Iterator[str]:
    """The address of a bare Starlette in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        command = [sys.executable, "-c", STARLETTE, str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            # The socket listens already: requests wait until the program accepts them.
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def measure(address: str, processes: int, seconds: float) -> tuple[float, float]:
    """(requests a second, median time in ms) of so many processes of clients."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        found = pool.starmap(_client_process, [(address, seconds)] * processes)
    times_s = sorted(time_s for times, _ in found for time_s in times)
    return sum(len(times) / elapsed_s for times, elapsed_s in found), times_s[len(times_s) // 2] * 1e3


def _client_process(address: str, seconds: float) -> tuple[list[float], float]:
    return asyncio.run(_clients(address, seconds))


async def _clients(address: str, seconds: float) -> tuple[list[float], float]:
    times: list[float] = []
    request = _request(address)
    await _client(address, request, time.perf_counter() + 1e-3, [])  # once, when the server is there and warm
    began_s = time.perf_counter()
    end_s = began_s + seconds
    await asyncio.gather(*(_client(address, request, end_s, times) for _ in range(CONNECTIONS)))
    return times, time.perf_counter() - began_s


def _request(address: str) -> bytes:
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
    header = json.dumps({"inputs": [tensor], "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}]})
    body = header.encode() + bytes(64)
    lines = [
        "POST /v2/models/same/infer HTTP/1.1",
        f"Host: {address}",
        f"Inference-Header-Content-Length: {len(header)}",
        f"Content-Length: {len(body)}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


async def _client(address: str, request: bytes, end_s: float, times: list[float]) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    while not times or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"the request failed: {head[:200]!r}")
        length = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        times.append(time.perf_counter() - began_s)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
