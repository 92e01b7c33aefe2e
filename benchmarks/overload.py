"""Behaviour under overload: `python -m benchmarks.overload` prints a table.

Python models with a fixed time per request receive evenly spaced requests over HTTP through a whole `weir serve`, first
at 0.8 of their capacity, then at twice of it. Requests that would wait for longer than `--wait` are rejected. The table
shows the latency of responses and rejections, CPU time per response and per rejection by role, and memory by role:
private resident memory, and payload slots of all roles together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from weir import Server
from weir.bus.naming.identity import SEGMENT_PREFIX, SHARED_MEMORY_DIRECTORY

ROLES = ("gateway", "scheduler", "worker", "nats-server")
SHARED = "shared memory"
_SEGMENT = re.compile(rf"{SHARED_MEMORY_DIRECTORY}/{SEGMENT_PREFIX}\S+")

MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(MILLISECONDS / 1000 * len(requests))
        sizes = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[:, :1] for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", size)]) for size in sizes]
"""
CONFIG = """
backend: "python" max_batch_size: 1
input { name: "IN" data_type: TYPE_UINT8 dims: -1 } output { name: "OUT" data_type: TYPE_UINT8 dims: 1 }
instance_group { kind: KIND_CPU count: 1 }
"""


def write_models(folder: Path, models: int, milliseconds: float) -> None:
    """So many models, all alike, that take so long for each request."""
    for number in range(models):
        version = folder / f"model{number}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL.replace("MILLISECONDS", str(milliseconds)))
        (version.parent / "config.pbtxt").write_text(CONFIG)


class Connection(asyncio.Protocol):
    """One request after another, and how long its answer took."""

    def __init__(self) -> None:
        self._came = bytearray()
        self._answer: asyncio.Future[tuple[int, bool]] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, found, body = bytes(self._came).partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length and self._answer is not None:
            self._came.clear()
            self._answer.set_result((int(head[9:12]), b"retry-after:" in head.lower()))

    async def ask(self, request: list[bytes]) -> tuple[int, bool]:
        """Status of the answer, and whether it tells when to come again."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.writelines(request)
        return await self._answer


class Load:
    """Requests to some models in turn; the time of each answer by its status, in milliseconds."""

    def __init__(self, host: str, port: int, models: int, size_bytes: int) -> None:
        self._place = host, port
        self._idle: list[Connection] = []
        self._content = bytes(size_bytes)
        self._heads = [self._head(number) for number in range(models)]
        self.taken_ms: defaultdict[int, list[float]] = defaultdict(list)
        self.untold = 0

    def _head(self, model: int) -> bytes:
        size = len(self._content)
        header = (
            b'{"inputs":[{"name":"IN","datatype":"UINT8","shape":[1,%d],"parameters":{"binary_data_size":%d}}],'
            b'"outputs":[{"name":"OUT"}]}' % (size, size)
        )
        return (
            b"POST /v2/models/model%d/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (model, len(header), len(header) + size, header)
        )

    async def run(self, per_s: float, seconds: float) -> None:
        """Returns when all have had their answers."""
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as asked:
            for number in range(int(per_s * seconds)):
                await asyncio.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
                asked.create_task(self._ask(self._heads[number % len(self._heads)]))

    async def capacity_per_s(self, seconds: float) -> float:
        """What is answered in a second where each model always has three to do."""
        began_s = time.perf_counter()

        async def go_on(head: bytes) -> None:
            while time.perf_counter() < began_s + seconds:
                await self._ask(head)

        await asyncio.gather(*(go_on(head) for head in self._heads * 3))
        return len(self.taken_ms[200]) / (time.perf_counter() - began_s)

    async def _ask(self, head: bytes) -> None:
        if self._idle:
            connection = self._idle.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, *self._place)
        began_s = time.perf_counter()
        status, is_told = await connection.ask([head, self._content])
        self.taken_ms[status].append((time.perf_counter() - began_s) * 1000)
        self.untold += status != 200 and not is_told
        self._idle.append(connection)

    def line(self, status: int) -> str:
        """How many had this status, and how long that took."""
        taken = self.taken_ms[status]
        if not taken:
            return f"{0:>9} {'-':>9} {'-':>9} {'-':>9}"
        p50, p99, most = np.percentile(taken, [50, 99, 100])
        return f"{len(taken):>9} {p50:>9.1f} {p99:>9.1f} {most:>9.1f}"


def processes() -> Iterator[tuple[str, psutil.Process]]:
    """Those of the server that play a role."""
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline()).split()  # a role that was forked off has one word there
        except psutil.Error:
            continue
        role = next((role for role in ROLES if any(word.endswith(role) for word in words[:6])), "")
        if role:
            yield role, process


def processor_ms() -> Counter[str]:
    """Processor time that each role has spent so far."""
    spent: Counter[str] = Counter()
    for role, process in processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            spent[role] += int(1000 * (times.user + times.system))
    return spent


def shared_mib() -> int:
    """What lies in payload slots of all roles."""
    segments: set[str] = set()
    for _, process in processes():
        with contextlib.suppress(OSError):
            segments.update(_SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    blocks = 0
    for segment in segments:
        with contextlib.suppress(OSError):
            blocks += Path(segment).stat().st_blocks
    return blocks * 512 >> 20


class Memory:
    """The memory of each role, and the most that it ever was; in MiB."""

    def __init__(self) -> None:
        self.worst: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def start(self) -> None:
        """Looks several times a second from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more."""
        self._is_over.set()
        self._thread.join()

    def look(self) -> Counter[str]:
        """What each role has now."""
        sizes: Counter[str] = Counter()
        for role, process in processes():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_info()
                sizes[role] += (memory.rss - memory.shared) >> 20
        sizes[SHARED] = shared_mib()
        return sizes

    def _watch(self) -> None:
        while not self._is_over.wait(0.25):
            for role, size in self.look().items():
                self.worst[role] = max(self.worst[role], size)


async def measure(url: str, options: argparse.Namespace, memory: Memory) -> None:
    """Print the rows."""
    host, _, port = url.removeprefix("http://").partition(":")
    sizes = options.models, options.kilobytes << 10
    capacity_per_s = await Load(host, int(port), *sizes).capacity_per_s(3)
    print(f"{capacity_per_s:.0f} requests/s are what {options.models} models can do, {options.kilobytes} KiB each")
    before = memory.look()
    memory.start()
    print(f"{'':34} {'answers':>9} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9}")
    spent: list[tuple[Counter[str], int, int]] = []
    for name, share in (("0.8 of the capacity", 0.8), ("twice the capacity", 2.0)):
        load, before_ms = Load(host, int(port), *sizes), processor_ms()
        await load.run(share * capacity_per_s, options.seconds)
        spent.append((processor_ms() - before_ms, len(load.taken_ms[200]), len(load.taken_ms[503])))
        print(f"{name + ', answered':34} {load.line(200)}")
        print(f"{name + ', refused':34} {load.line(503)}   without Retry-After: {load.untold}")
    await asyncio.sleep(2)
    memory.stop()
    after = memory.look()
    print(f"{'MiB resident and not shared':34} {'before':>9} {'worst':>9} {'after':>9}")
    for role in (*ROLES, SHARED):
        print(f"{role:34} {before[role]:>9} {memory.worst[role]:>9} {after[role]:>9}")
    print(f"{'ms of processor time':34} {'an answer':>9} {'a refusal':>9}")
    (calm_ms, calm, _), (full_ms, full, refused) = spent
    for role in ROLES:
        an_answer = calm_ms[role] / max(calm, 1)
        print(f"{role:34} {an_answer:>9.2f} {(full_ms[role] - full * an_answer) / max(refused, 1):>9.2f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each load lasts")
    parser.add_argument(
        "--wait", default="0.1", help="--max-queue-wait-secs of the server; 0: only the queue's size counts"
    )
    parser.add_argument("--kilobytes", type=int, default=1, help="size of a request's tensor")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="time that a model takes for a request")
    parser.add_argument("--models", type=int, default=1, help="models that are asked, each as often as the others")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), options.models, options.milliseconds)
        with Server(folder, max_queue_wait_secs=float(options.wait)) as server:
            asyncio.run(measure(server.http_url, options, Memory()))


if __name__ == "__main__":
    main()
