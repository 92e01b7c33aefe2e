"""What durable requests and a job cost the live requests beside them: `python -m benchmarks.durable_beside_live`.

One process sends small HTTP requests at a fixed rate and measures each from when it was due. Beside it runs, in turn:
nothing, a job that always has items left, a backlog of events that is consumed as fast as possible, and both. Each row is
measured twice: `apart`, with `weir durable` beside the gateway, as in `weir serve`; and `shared`, with a gateway that
runs them itself. The two servers are measured alternately, so that other load on the machine affects both. nats-server does
not sync each message to disk, so that the disk is not what limits events. CPU is in per cent of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import nats
import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.events import LazyNats
from tests.support.durable.models import IDENTITY, write_identity
from tests.support.waiting import wait_until

LOADS = ("nothing", "a job", "a backlog of events", "both")
JOB_ITEMS = 1_000_000
BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.5] * 16}]}).encode()
_GATEWAY = ("gateway", "--http-port={}", "--allow-grpc=false", "--allow-metrics=false")
_WARM_UP_S = 3.0


async def send_live(url: str, rate: float, seconds: float) -> list[float]:
    """Milliseconds of each request that was due within `seconds`."""
    place = urlsplit(url)
    free: asyncio.LifoQueue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.LifoQueue()
    head = f"POST /v2/models/{IDENTITY}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n"
    took_ms: list[float] = []

    async def send_one(due_s: float) -> None:
        if free.empty():
            free.put_nowait(await asyncio.open_connection(place.hostname, place.port))
        reader, writer = free.get_nowait()
        writer.write(head.encode() + BODY)
        header = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not header.startswith("http/1.1 200"):
            raise RuntimeError(header)
        await reader.readexactly(int(header.partition("content-length:")[2].split()[0]))
        took_ms.append((time.perf_counter() - due_s) * 1000)
        free.put_nowait((reader, writer))

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            due_s = began_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(send_one(due_s))
    return took_ms


async def publish(url: str, count: int) -> None:
    """Publishes this many events."""
    client = await nats.connect(url)
    for number in range(count):
        await client.publish(f"event.{IDENTITY}", BODY)
        if number % 1000 == 999:
            await client.flush()
    await client.drain()


class Stack:
    """The roles of one server on a nats-server of its own; `apart` says who runs durable requests and jobs."""

    def __init__(self, folder: Path, port: int, apart: bool) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        self._nats = LazyNats(folder / "nats")
        self._nats.start()
        gateway = [word.format(port) for word in _GATEWAY]
        root = f"--batch-root={folder}"
        commands = [["scheduler"], ["worker", f"--model-repository={folder / 'models'}"]]
        commands += [["durable", root], [*gateway, root, "--durable-consumer=false"]] if apart else [[*gateway, root]]
        self._processes = {words[0]: self._start(words) for words in commands}

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "weir", *words, f"--nats={self._nats.url}"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def nats_url(self) -> str:
        return self._nats.url

    def ask(self, method: str, path: str, body: object = None) -> dict[str, object]:
        """The JSON response of the server."""
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)) as got:
            found: dict[str, object] = json.loads(got.read() or b"{}")
        return found

    def is_ready(self) -> bool:
        try:
            self.ask("GET", f"/v2/models/{IDENTITY}/ready")
        except OSError:
            return False
        return True

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds of each role so far."""
        times = {role: psutil.Process(process.pid).cpu_times() for role, process in self._processes.items()}
        return {role: time.user + time.system for role, time in times.items()}

    @contextmanager
    def job(self) -> Iterator[None]:
        """Runs a job meanwhile."""
        output = tempfile.mkdtemp(prefix="output-", dir=self.folder)
        asked = {"model": IDENTITY, "input": str(self.folder / "items.jsonl"), "output": f"{output}/shards"}
        path = f"/v2/jobs/{self.ask('POST', '/v2/jobs', asked)['id']}"
        try:
            yield
        finally:
            self.ask("DELETE", path)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()
        self._nats.stop()


def measure(stack: Stack, load: str, options: argparse.Namespace) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of the live requests, and per cent of a core by role."""
    module = (sys.executable, "-m", "benchmarks.durable_beside_live")
    with ExitStack() as running:
        if load in ("a job", "both"):
            running.enter_context(stack.job())
            time.sleep(_WARM_UP_S)
        if load in ("a backlog of events", "both"):
            subprocess.run([*module, "publish", stack.nats_url, str(options.events)], check=True)
        before = stack.cpu_s()
        live = [*module, "send", stack.url, str(options.rate), str(options.seconds)]
        took_ms = json.loads(subprocess.run(live, check=True, stdout=subprocess.PIPE).stdout)
        after = stack.cpu_s()
    return took_ms, {role: 100 * (after[role] - before[role]) / options.seconds for role in after}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="live requests/s")
    parser.add_argument("--events", type=int, default=20_000, help="events that wait when a row begins")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row, each time")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    took: dict[tuple[str, str], list[float]] = {}
    spent: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="beside-") as text, ExitStack() as stopping:
        stacks: dict[str, Stack] = {}
        for number, name in enumerate(("shared", "apart")):
            folder = Path(text) / name
            write_identity(folder / "models")
            with (folder / "items.jsonl").open("w") as file:
                file.writelines(json.dumps({"X": [1.5] * 16}) + "\n" for _ in range(JOB_ITEMS))
            stacks[name] = Stack(folder, 18500 + number, apart=name == "apart")
            stopping.callback(stacks[name].stop)
        for stack in stacks.values():
            wait_until(stack.is_ready)
        for load in LOADS:
            for turn in range(options.rounds):
                for name in sorted(stacks, reverse=bool(turn % 2)):
                    took_ms, cpu = measure(stacks[name], load, options)
                    took.setdefault((load, name), []).extend(took_ms)
                    spent.setdefault((load, name), []).append(cpu)
    table = Table("beside", "events and jobs", "p50 ms", "p99 ms", "CPU by role, % of a core", box=box.MARKDOWN)
    for (load, name), took_ms in took.items():
        rows = spent[load, name]
        cpu = {role: sum(row[role] for row in rows) / len(rows) for role in rows[0]}
        reply = ", ".join(f"{role} {share:.0f}" for role, share in cpu.items())
        p50, p99 = np.percentile(took_ms, [50, 99])
        table.add_row(load, name, f"{p50:.2f}", f"{p99:.2f}", reply)
    Console(width=160).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["send"]:
        print(json.dumps(asyncio.run(send_live(sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))))
    elif sys.argv[1:2] == ["publish"]:
        asyncio.run(publish(sys.argv[2], int(sys.argv[3])))
    else:
        main()
