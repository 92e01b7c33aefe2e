"""Model repositories in an object store: `python -m benchmarks.model_stores`.

The store is a small server of S3's listings and ranges with a bound on bytes per second and a latency before each
response. Two things are measured, each from the start of `weir serve`:

- `start`: models of `--megabytes` each. Time until the first model answers and until all are ready, with an empty cache and
  with a full one, and the largest resident size of the worker.
- `poll`: many small models, listed every `--interval` seconds. CPU of the worker and requests to the store for a poll,
  beside the same server that does not poll.

Only the file `weights` of a model is large, and no backend reads it: the figures are those of the download.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple
from xml.sax.saxutils import escape

import psutil
import typer

from benchmarks.compare.servers import free_ports, port_options
from tests.support.models.zoo import write_identity

_FOLDER = Path(__file__).resolve().parents[1] / ".bench" / "model_stores"
_PIECE = 1 << 18
_PAGE = 1000

app = typer.Typer(help=__doc__)


# The store


class Store:
    """The bucket `bucket` with the files of a folder, as S3 lists and sends them."""

    def __init__(self, folder: Path, bytes_per_s: float, latency_s: float) -> None:
        self._folder = folder
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0
        self.listings = self.reads = 0
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self._keys = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        self._sorted = sorted(self._keys)

    async def run(self, port: int) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                target = head.split(" ", 2)[1]
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                path, _, query = target.partition("?")
                if path == "/counters":
                    counters = {"listings": self.listings, "reads": self.reads}
                    await self._send(writer, json.dumps(counters).encode())
                    continue
                await asyncio.sleep(self._latency_s)
                if "list-type" in query:
                    self.listings += 1
                    await self._send(writer, self._listing(dict(urllib.parse.parse_qsl(query))))
                else:
                    self.reads += 1
                    await self._read(writer, urllib.parse.unquote(path).removeprefix("/bucket/"), headers.get("range"))
        writer.close()

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = [key for key in self._sorted if key.startswith(prefix) and key > after]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{abs(hash(key)):x}-1&quot;</ETag><Size>{self._keys[key]}</Size></Contents>"
            for key in keys[:_PAGE]
        )
        more = len(keys) > _PAGE
        token = f"<NextContinuationToken>{escape(keys[_PAGE - 1])}</NextContinuationToken>" if more else ""
        flag = str(more).lower()
        return f"<ListBucketResult>{rows}<IsTruncated>{flag}</IsTruncated>{token}</ListBucketResult>".encode()

    async def _send(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await self._pace(len(body))
        await writer.drain()

    async def _read(self, writer: asyncio.StreamWriter, key: str, span: str | None) -> None:
        size = self._keys[key]
        start, last = map(int, (span or f"bytes=0-{size - 1}").removeprefix("bytes=").split("-"))
        writer.write(
            f"HTTP/1.1 206 Partial Content\r\nContent-Length: {last - start + 1}\r\n"
            f'Content-Range: bytes {start}-{last}/{size}\r\nETag: "{abs(hash(key)):x}-1"\r\n'
            "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n".encode()
        )
        with (self._folder / key).open("rb") as content:
            for offset in range(start, last + 1, _PIECE):
                count = min(_PIECE, last + 1 - offset)
                writer.write(os.pread(content.fileno(), count, offset))
                await self._pace(count)
                await writer.drain()

    async def _pace(self, size: int) -> None:
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s) + size / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._free_s - now_s))


@app.command(hidden=True)
def store(folder: Path, port: int, bytes_per_s: float, latency_s: float) -> None:
    """Serve a folder as a store."""
    asyncio.run(Store(folder, bytes_per_s, latency_s).run(port))


class RunningStore:
    """A store in a process of its own."""

    def __init__(self, folder: Path, megabytes_per_s: float, latency_ms: float) -> None:
        (self._port,) = free_ports()[:1]
        words = [str(folder), str(self._port), str(megabytes_per_s * 1e6), str(latency_ms / 1e3)]
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.model_stores", "store", *words])
        self.address = f"s3://127.0.0.1:{self._port}/bucket"
        while True:
            with contextlib.suppress(OSError):
                self.counters()
                return
            time.sleep(0.05)

    def counters(self) -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/counters") as response:
            return dict(json.load(response))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _serving(folder: Path, megabytes_per_s: float, latency_ms: float) -> Iterator[RunningStore]:
    running = RunningStore(folder, megabytes_per_s, latency_ms)
    try:
        yield running
    finally:
        running.close()


# The server


class Weir:
    """A `weir serve` of a repository in a store; `peak_bytes` is the largest resident size of its worker."""

    def __init__(self, address: str, cache: Path, *options: str) -> None:
        ports = free_ports()
        self.url = f"http://127.0.0.1:{ports[0]}"
        command = [sys.executable, "-m", "weir", "serve", f"--model-repository={address}", *port_options(ports)]
        command += [f"--model-cache-dir={cache}", f"--data-dir={cache}-data", "--allow-gpu-metrics=false", *options]
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        self._log = Path(f"{cache}.log").open("w")  # noqa: SIM115 - closed with the server
        self.started_s = time.monotonic()
        self._process = psutil.Popen(command, env={**os.environ, **keys}, stdout=self._log, stderr=self._log)
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._sampling = threading.Thread(target=self._sample)
        self._sampling.start()

    @property
    def worker(self) -> psutil.Process | None:
        """The process of the worker; its title has the name of the role."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self._process.children():
                if " worker" in " ".join(child.cmdline()):
                    return child
        return None

    def _sample(self) -> None:
        worker = None
        while not self._is_over.wait(0.05):
            worker = worker or self.worker
            if worker is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.peak_bytes = max(self.peak_bytes, worker.memory_info().rss)

    def since_start(self) -> float:
        return time.monotonic() - self.started_s

    def get(self, path: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}{path}", timeout=5) as response:
            return bool(response.status == 200)
        return False

    def infers(self, model: str) -> bool:
        body = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
        request = urllib.request.Request(f"{self.url}/v2/models/{model}/infer", json.dumps(body).encode())
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as response:
            return bool(response.status == 200)
        return False

    def wait(self, condition: str, names: Sequence[str], timeout_s: float = 900) -> float:
        """Seconds from the start until the `first` model answers, or `all` are ready."""
        while self.since_start() < timeout_s:
            if condition == "first" and any(
                self.get(f"/v2/models/{name}/ready") and self.infers(name) for name in names
            ):
                return self.since_start()
            if condition == "all" and self.get("/v2/health/ready"):
                return self.since_start()
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended: see {self._log.name}")
            time.sleep(0.02)
        raise SystemExit(f"not {condition} within {timeout_s} s: see {self._log.name}")

    def close(self) -> None:
        self._is_over.set()
        self._sampling.join()
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


class Start(NamedTuple):
    """One start: seconds until the first answer and until all models are ready, and the worker's largest size."""

    first_s: float
    all_s: float
    peak_mb: float


def _write(folder: Path, models: int, weights_bytes: int) -> list[str]:
    shutil.rmtree(folder, ignore_errors=True)
    names = [f"model_{number:04}" for number in range(models)]
    write_identity(folder, names[0], "FP32")
    config = (folder / names[0] / "config.pbtxt").read_text()
    for number, name in enumerate(names):
        if number:
            shutil.copytree(folder / names[0], folder / name)
            (folder / name / "config.pbtxt").write_text(config.replace(names[0], name))
        (folder / name / "1" / "labels.txt").write_text(name)
    if weights_bytes:
        for name in names:
            with (folder / name / "1" / "weights").open("wb") as weights:
                weights.write(name.encode())
                weights.truncate(weights_bytes)
    return names


@app.command()
def start(
    models: Annotated[int, typer.Option(help="Models.")] = 40,
    megabytes: Annotated[int, typer.Option(help="Size of each.")] = 50,
    rate: Annotated[float, typer.Option(help="MB/s of the store.")] = 100,
    latency_ms: Annotated[float, typer.Option(help="Latency of the store.")] = 20,
    rounds: Annotated[int, typer.Option(help="Starts of each kind.")] = 3,
) -> None:
    """Start with an empty cache and with a full one."""
    folder = _FOLDER / "start"
    names = _write(folder, models, megabytes * 1_000_000)
    size_mb = models * megabytes
    print(f"{models} models, {size_mb} MB; store of {rate:g} MB/s: at least {size_mb / rate:.1f} s")
    print(f"{'cache':>6} {'first answer s':>15} {'all ready s':>12} {'worker MB':>10}")
    with _serving(folder, rate, latency_ms) as opened:
        for _ in range(rounds):
            cache = _FOLDER / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(f"{cache}-data", ignore_errors=True)
            for label in ("empty", "full"):
                row = _start(opened.address, cache, names)
                print(f"{label:>6} {row.first_s:>15.1f} {row.all_s:>12.1f} {row.peak_mb:>10.0f}", flush=True)
    shutil.rmtree(_FOLDER, ignore_errors=True)


def _start(address: str, cache: Path, names: Sequence[str]) -> Start:
    server = Weir(address, cache)
    try:
        first_s = server.wait("first", names)
        return Start(first_s, server.wait("all", names), server.peak_bytes / 1e6)
    finally:
        server.close()


@app.command()
def poll(
    models: Annotated[int, typer.Option(help="Models.")] = 2000,
    interval: Annotated[float, typer.Option(help="Seconds between two polls.")] = 1,
    seconds: Annotated[int, typer.Option(help="Seconds of a window.")] = 20,
    rounds: Annotated[int, typer.Option(help="Windows of each server.")] = 3,
) -> None:
    """Poll many models."""
    folder = _FOLDER / "poll"
    names = _write(folder, models, 0)
    one_thread = "--backend-config=onnxruntime,intra_op_thread_count=1"
    with _serving(folder, 1000, 20) as opened, contextlib.ExitStack() as stack:
        servers: dict[str, Weir] = {}
        for label, mode in (("polls", ("poll", f"--repository-poll-secs={interval}")), ("does not", ("none",))):
            options = [f"--model-control-mode={mode[0]}", *mode[1:], one_thread]
            servers[label] = Weir(opened.address, _FOLDER / label.replace(" ", "-"), *options)
            stack.callback(servers[label].close)
            ready_s = servers[label].wait("all", names)
            print(f"{label}: {models} models ready after {ready_s:.0f} s", flush=True)
        print(f"{'server':>9} {'worker CPU %':>13} {'listing requests/s':>19} {'reads/s':>8}")
        for _ in range(rounds):
            for label, server in servers.items():
                worker = server.worker
                assert worker is not None
                counted, before = opened.counters(), sum(worker.cpu_times()[:2])
                began_s = time.monotonic()
                time.sleep(seconds)
                took_s = time.monotonic() - began_s
                cpu = (sum(worker.cpu_times()[:2]) - before) / took_s * 100
                after = opened.counters()
                listings, reads = ((after[key] - counted[key]) / took_s for key in ("listings", "reads"))
                print(f"{label:>9} {cpu:>13.1f} {listings:>19.1f} {reads:>8.1f}", flush=True)
    shutil.rmtree(_FOLDER, ignore_errors=True)


if __name__ == "__main__":
    app()
