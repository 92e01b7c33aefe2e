"""What the console costs beside a cluster of 200 models and 50 workers: processor time of its process, by view.

    python -m benchmarks.console_cost [--models 200] [--workers 50] [--seconds 10]

A real nats-server and a real console; the workers, the scheduler and the gateway are simulated by this process: they
register, send heartbeats, announce their presence, and answer queries of counters, which grow as if each model had 100
requests a second. A view is polled as the page polls it. Prints one row for each view: milliseconds of processor time a
second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from weir.bus.kv.registry import RegistryWriter
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import ensure_streams
from weir.schemas.wire.registry import Heartbeat, ModelRecord, ModelState, RoleRecord, VersionRecord, WorkerRecord
from weir.schemas.wire.statistics import pack_counters
from weir.telemetry.instruments import DurationHistogram

HOST = "0badc0de"
REQUESTS_PER_S = 100

VIEWS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "no page open": (),
    "overview": (("/api/series?since_ms={now}", 1.0), ("/api/models", 2.0), ("/api/status", 2.0)),
    "models": (("/api/models", 1.0), ("/api/status", 2.0)),
    "topology": (("/api/status", 2.0),),
    "one model": (
        ("/api/models", 1.0),
        ("/api/series?model=model-7&since_ms={now}", 1.0),
        ("/api/models/model-7", 2.0),
    ),
    "requests": (("/api/requests?limit=50", 1.0), ("/api/models", 5.0)),
    "batching": (("/api/batching?model=model-7&after=0", 0.5), ("/api/models", 5.0)),
}
"""The paths that each view polls, and how often in seconds. {now} is the time of the last point."""

CONFIG = {
    "name": "",
    "backend": "onnxruntime",
    "max_batch_size": 16,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [16]}],
    "dynamic_batching": {"max_queue_delay_microseconds": 2000},
}


class Cluster:
    """Workers, one scheduler and one gateway. Each worker serves a share of the models, each model on several workers."""

    def __init__(self, bus: Bus, workers: int, models: int) -> None:
        self._bus = bus
        self._started_s = time.monotonic()
        names = [f"model-{number}" for number in range(models)]
        share = max(1, 4 * models // workers)
        self._models = {
            f"worker-{HOST}-{number:08x}": [names[(number * share + place) % models] for place in range(share)]
            for number in range(workers)
        }
        self._names = names
        self._writers: dict[str, RegistryWriter] = {}

    async def register(self) -> None:
        """Writes all records, and answers queries from now on."""
        await ensure_streams(self._bus)
        for worker, models in self._models.items():
            writer = self._writers[worker] = RegistryWriter(self._bus, worker)
            await writer.write_worker(WorkerRecord(worker, os.getpid(), settled=True))
            for name in models:
                versions = {1: VersionRecord(ModelState.READY, instances=2)}
                await writer.write_model(ModelRecord(name, versions, {**CONFIG, "name": name}))
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._answer)
        await self._bus.subscribe(subjects.PRESENCE_QUERY, lambda message: self._announce())

    async def live(self) -> None:
        """Sends heartbeats and presence once a second."""
        while True:
            self._announce()
            for worker, writer in self._writers.items():
                writer.beat(Heartbeat(worker, {}))
            await asyncio.sleep(1.0)

    def _announce(self) -> None:
        others = (("scheduler", f"scheduler-{HOST}-1"), ("gateway", f"gateway-{HOST}-1"))
        for role, id in (*others, *(("worker", worker) for worker in self._models)):
            record = RoleRecord(role=role, id=id, host=HOST, pid=os.getpid(), since_ms=1)  # type: ignore[arg-type]
            self._bus.publish(subjects.presence(role, id), record.pack())

    def _answer(self, message: Message) -> None:
        requests = int((time.monotonic() - self._started_s) * REQUESTS_PER_S)
        latency = DurationHistogram()
        for duration_us in (900, 1500, 2500, 9000):
            latency.add_all([duration_us * 1000] * (requests // 16), 0)
        buckets = latency.buckets()
        for worker, models in self._models.items():
            rows = [version_row(name, requests // 4, buckets) for name in models]
            load = {"instances": 2 * len(models), "busy": len(models), "utilization": 0.5}
            self._bus.publish(message.reply, pack_counters({"worker": worker, "models": rows, "load": load}))
        queues = [queue_row(name) for name in self._names]
        self._bus.publish(message.reply, pack_counters({"scheduler": f"scheduler-{HOST}-1", "models": queues}))


def version_row(model: str, requests: int, latency: Any) -> dict[str, Any]:
    """The counters of a version on a worker."""
    pair = [requests, requests * 1_000_000]
    durations = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return {
        "model": model,
        "version": 1,
        **dict.fromkeys(durations, pair),
        "fail": [0, 0],
        "inference_count": requests,
        "execution_count": requests // 4,
        "last_inference_ms": 1,
        "failures": {},
        "batches": {size: [requests // 16, 1, 1, 1] for size in (1, 4, 8, 16)},
        "latency": latency,
    }


def queue_row(model: str) -> dict[str, Any]:
    """The counters of a queue at its scheduler."""
    return {
        "model": model,
        "lanes": {"live": {"depth": 3, "oldest_us": 1500}},
        "versions": [{"version": 1, "pending": 3, "busy": 2}],
        "load": {"instances": 8, "utilization": 0.5},
    }


async def poll(client: httpx.AsyncClient, path: str, every_s: float) -> None:
    """Polls a path as the page does."""
    while True:
        now_ms = int(time.time() * 1000) - 1500
        (await client.get(path.format(now=now_ms))).raise_for_status()
        await asyncio.sleep(every_s)


async def measure(console: psutil.Process, url: str, seconds: float) -> None:
    """Prints a row for each view. Raises RuntimeError if the console does not see the whole cluster."""
    async with httpx.AsyncClient(base_url=url) as client:
        await asyncio.sleep(4.0)
        rows = (await client.get("/api/models")).json()["models"]
        seen = [row for row in rows if (row["requests_per_s"] or 0) > 0 and row["p99_ms"] and row["workers"]]
        if not rows or len(seen) < len(rows):
            raise RuntimeError(f"the console has the load of {len(seen)} of {len(rows)} models")
        print(
            f"{len(rows)} models; model-7: {seen[7]['requests_per_s']:.0f} requests/s on {seen[7]['workers']} workers"
        )
    print("view            CPU of the console, ms/s")
    for view, paths in VIEWS.items():
        async with httpx.AsyncClient(base_url=url) as client:
            polls = [asyncio.create_task(poll(client, *path)) for path in paths]
            await asyncio.sleep(2.0)
            before, started_s = sum(console.cpu_times()[:2]), time.monotonic()
            await asyncio.sleep(seconds)
            used_s = sum(console.cpu_times()[:2]) - before
            print(f"{view:15} {1000 * used_s / (time.monotonic() - started_s):8.1f}", flush=True)
            for task in polls:
                task.cancel()
            results = await asyncio.gather(*polls, return_exceptions=True)
            failed = [error for error in results if isinstance(error, Exception)]
            if failed:
                raise failed[0]


async def run(models: int, workers: int, seconds: float) -> None:
    """Starts everything, measures, and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats(Path(folder))
        url = server.start()
        try:
            async with asyncio.TaskGroup() as background:
                bus = await Bus.connect(url, f"gateway-{HOST}-1", background, role="gateway")
                cluster = Cluster(bus, workers, models)
                await cluster.register()
                living = background.create_task(cluster.live())
                ready, announced = os.pipe()
                with subprocess.Popen(  # noqa: ASYNC220 - once, at the start
                    [sys.executable, "-m", "weir", "console", "--console-port=0"],
                    env={**os.environ, "WEIR_NATS_URL": url, "WEIR_READY_FD": str(announced)},
                    pass_fds=(announced,),
                    stderr=subprocess.DEVNULL,
                ) as process:
                    os.close(announced)
                    line = await asyncio.to_thread(os.read, ready, 65536)
                    port = int(line.split(b'"console_port":')[1].split(b",")[0].strip(b" }\n"))
                    try:
                        await measure(psutil.Process(process.pid), f"http://127.0.0.1:{port}", seconds)
                    finally:
                        process.terminate()
                        living.cancel()
                        await bus.close()
        finally:
            server.stop()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    asyncio.run(run(given.models, given.workers, given.seconds))


if __name__ == "__main__":
    main()
