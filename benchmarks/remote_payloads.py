"""Large tensors to a worker on another host and back: `python -m benchmarks.remote_payloads` prints two tables.

The first table has whole requests to an identity model over HTTP. Their tensors are sent inside messages through stream
and scheduler (*inline*), or fetched on a link between gateway and worker (*tcp*); with a worker on the gateway's host they
are read in place (*shared*). The second table has the link between two processes alone. CPU is that of all processes
except the client. All processes run on one machine, so the times include no network; `RoleHosts` starts roles that act as
on another host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import tritonclient.http as triton
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from weir.bus.naming.identity import HOST_VARIABLE, new_id
from weir.bus.nats.access import NO_ACCESS
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.remote_links import make_listener
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, PayloadArena
from weir.bus.payloads.fetch_plan import Outcome
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.bus.payloads.server import PayloadServer
from weir.runtime.readiness import READY_FD
from weir.schemas.core.names import ListenAddress
from weir.schemas.core.tensors import PayloadRef

SIZES = (65_540, 200_000, 600_000, 4_000_000)
_WARM_UP_S = 0.5
IDENTITY = "identity"

# A role whose limit of what is large is another: the one where nothing is, or the same between hosts as on one.
_LIMITED = (
    "import sys, weir.bus.payloads.arena; weir.bus.payloads.arena.INLINE_LIMIT_BYTES = weir.bus.payloads.arena.REMOTE_INLINE_LIMIT_BYTES = {}; "  # noqa: E501
    "from weir.commands.app import main; main()"
)


def main() -> None:
    """Runs both and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--ways-only", action="store_true", help="leave the first table out")
    parser.add_argument("--clients", type=int, default=4, help="that ask at once, where load is measured")
    options = parser.parse_args()
    console = Console()
    if not options.ways_only:
        console.print(_of_requests(options.seconds, options.clients))
    console.print(_of_ways(options.seconds))


# Whole requests


def _of_requests(seconds: float, clients: int) -> Table:
    table = _table("way", "bytes", "p50 alone, ms", "CPU alone, ms", f"requests/s, {clients} clients", "CPU, ms")
    for way in ("inline", "tcp", "shared"):
        with ExitStack() as stack:
            cluster = _Cluster(stack, way)
            for size in SIZES:
                table.add_row(way, str(size), *cluster.measured(size, seconds, clients))
    return table


class _Cluster:
    def __init__(self, stack: ExitStack, way: str) -> None:
        limit_bytes = 1 << 30 if way == "inline" else INLINE_LIMIT_BYTES
        roles = RoleHosts(stack, _LIMITED.format(limit_bytes))
        _write_identity(roles.folder / "models" / IDENTITY)
        listens = ("--payload-listen=127.0.0.1",) if way == "tcp" else ()
        roles.start("scheduler")
        models = f"--model-repository={roles.folder / 'models'}"
        roles.start("worker", models, *listens, host="" if way == "shared" else "another")
        self._url = roles.gateway(IDENTITY, *listens)
        self._pids = roles.pids

    def measured(self, size: int, seconds: float, clients: int) -> Iterable[str]:
        alone, alone_cpu_s = self._asked(size, seconds, 1)
        loaded, loaded_cpu_s = self._asked(size, seconds, clients)
        return (
            f"{statistics.median(alone) * 1000:.2f}",
            f"{alone_cpu_s / len(alone) * 1000:.2f}",
            f"{len(loaded) / seconds:.0f}",
            f"{loaded_cpu_s / len(loaded) * 1000:.2f}",
        )

    def _asked(self, size: int, seconds: float, clients: int) -> tuple[list[float], float]:
        content = np.random.default_rng(1).random((1, size // 4), np.float32)
        for warm_up in (True, False):
            before_s, until_s = _cpu_s(self._pids), time.monotonic() + (_WARM_UP_S if warm_up else seconds)
            with ThreadPoolExecutor(clients) as pool:
                rows = pool.map(lambda _: _ask_until(self._url, content, until_s), range(clients))  # noqa: B023
                took = [one_s for row in rows for one_s in row]
        return took, _cpu_s(self._pids) - before_s


def _write_identity(folder: Path) -> None:
    (folder / "1").mkdir(parents=True)
    tensor = "data_type: TYPE_FP32 dims: [ -1 ] }"
    tensors = f'input {{ name: "IN" {tensor} output {{ name: "OUT" {tensor}'
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 8 {tensors}')
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None]) for name in ("IN", "OUT")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["IN"], ["OUT"])], IDENTITY, ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "1" / "model.onnx")


def _ask(client: triton.InferenceServerClient, content: np.ndarray) -> float:
    tensor = triton.InferInput("IN", list(content.shape), "FP32")
    tensor.set_data_from_numpy(content)
    began_s = time.perf_counter()
    output = client.infer(IDENTITY, [tensor], outputs=[triton.InferRequestedOutput("OUT")]).as_numpy("OUT")
    took_s = time.perf_counter() - began_s
    if output is None or output[0, -1] != content[0, -1]:
        raise SystemExit("a wrong answer")
    return took_s


def _ask_until(url: str, content: np.ndarray, until_s: float) -> list[float]:
    took: list[float] = []
    with triton.InferenceServerClient(url) as client:
        while time.monotonic() < until_s:
            took.append(_ask(client, content))
    return took


# The way alone


def _of_ways(seconds: float) -> Table:
    table = _table("bytes", "p50, ms", "MB/s", "CPU, ms")
    for size in SIZES:
        with ExitStack() as stack:
            table.add_row(str(size), *_carried(stack, size, seconds))
    return table


def _carried(stack: ExitStack, size: int, seconds: float) -> Iterable[str]:
    nats = EmbeddedNats(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    nats.start()
    stack.callback(nats.stop)
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    os.environ[HOST_VARIABLE] = "owner"
    process = spawning.Process(target=_own, args=(nats.url, size, there), daemon=True)
    process.start()
    del os.environ[HOST_VARIABLE]
    stack.callback(process.join)
    stack.callback(process.terminate)
    place = here.recv()
    assert nats.process is not None
    assert process.pid is not None
    pids = [nats.process.pid, process.pid, os.getpid()]
    before_s = _cpu_s(pids)
    took = uvloop.run(_read(nats.url, place, size, seconds))
    cpu_s = _cpu_s(pids) - before_s
    return (
        f"{statistics.median(took) * 1000:.2f}",
        f"{size / statistics.median(took) / 1e6:.0f}",
        f"{cpu_s / len(took) * 1000:.3f}",
    )


def _own(nats_url: str, size: int, pipe: Connection) -> None:
    async def serve() -> None:
        async with asyncio.TaskGroup() as background:
            name = new_id("gateway")
            bus = await Bus.connect(nats_url, name, background)
            listener = make_listener(ListenAddress("127.0.0.1"), NO_ACCESS, is_encrypted=False)
            await listener.start()
            await PayloadServer(bus, name, listener).start()
            await bus.flush()
            slot = PayloadArena(name).allocate(size)
            assert slot is not None
            pipe.send(tuple(slot.ref()))
            await asyncio.sleep(3600)

    uvloop.run(serve())


async def _read(nats_url: str, place: Any, size: int, seconds: float) -> list[float]:
    took: list[float] = []
    async with asyncio.TaskGroup() as background:
        name = new_id("worker")
        bus = await Bus.connect(nats_url, name, background)
        fetcher = PayloadFetcher(bus, name)
        await fetcher.start(background)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            came: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            began_s = time.perf_counter()
            fetcher.fetch(PayloadRef(*place), came.set_result)
            outcome = await came
            took.append(time.perf_counter() - began_s)
            if not isinstance(outcome, (bytes, memoryview)) or len(outcome) != size:
                raise SystemExit(f"not fetched: {type(outcome).__name__}")
        fetcher.close()
        await bus.close()
    return took


def _cpu_s(pids: Iterable[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


if __name__ == "__main__":
    main()


class RoleHosts:
    """Roles on one nats-server, some with another host id. `code` runs instead of the command line; `stack` stops all."""

    def __init__(self, stack: ExitStack, code: str = "") -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._code = code
        self._nats = EmbeddedNats(self.folder / "nats")
        self._nats.start()
        stack.callback(self._nats.stop)
        self._processes: list[subprocess.Popen[bytes]] = []
        stack.callback(self._end)

    @property
    def pids(self) -> list[int]:
        """Of all roles, and of nats-server."""
        assert self._nats.process is not None
        return [self._nats.process.pid, *(process.pid for process in self._processes)]

    def start(self, role: str, *options: str, host: str = "") -> Any:
        """What a new role announced when it was ready."""
        ready, announced = os.pipe()
        command = ["-c", self._code] if self._code else ["-m", "weir"]
        environment = {**os.environ, READY_FD: str(announced), **({HOST_VARIABLE: host} if host else {})}
        log_file = self.folder / f"{role}-{len(self._processes)}.log"
        with log_file.open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *command, role, f"--nats={self._nats.url}", *options],
                    env=environment,
                    pass_fds=(announced,),
                    stdout=log,
                    stderr=log,
                )
            )
        os.close(announced)
        with os.fdopen(ready) as pipe:
            facts = json.loads(pipe.readline() or "{}")
        if not facts.get("ready"):
            raise SystemExit(log_file.read_text())
        return facts

    def gateway(self, model: str, *options: str, host: str = "") -> str:
        """Where a new gateway listens for HTTP, once `model` is ready there."""
        ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
        url = f"127.0.0.1:{self.start('gateway', *ports, *options, host=host)['http_port']}"
        with triton.InferenceServerClient(url) as client:
            while not client.is_model_ready(model):
                time.sleep(0.05)
        return url

    def _end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(30)
