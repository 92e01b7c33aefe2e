"""Growth of memory, descriptors and streams: `python -m benchmarks.soak --minutes 30` prints a table of slopes.

Roles are separate processes on one nats-server. After a measurement of their capacity, requests come at a share of it
(`--load`), with durable requests at a low rate beside them. Every `--every` seconds the memory and the open descriptors
of each process are recorded, and the contents of the streams. The slope after the warm-up is a least-squares line. It
is significant if it exceeds three of its standard errors, corrected for the correlation of successive samples, and
amounts to more than `MIN_GROWTH_MIB` or `MIN_FDS`. RESULT keeps records for a day, so it grows with durable requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import nats
import numpy as np
import psutil
from nats.errors import Error as NatsError

from benchmarks.cluster.clients import OpenLoop, closed_loop, quantile, table, wait_ready
from benchmarks.cluster.roles import Cluster, write_sleeper
from weir.bus.naming.durable_subjects import RESULT_STREAM

MODEL = "sleeper"
MIN_GROWTH_MIB = 2.0
MIN_FDS = 2.0
KEPT = f"stream {RESULT_STREAM}"
_ERRORS = 3.0
_MIN_SAMPLES = 8


class Samples:
    """Values over time, by what they are of."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.of: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """One value, now."""
        self.of[name].append(((time.monotonic() - self._began_s) / 3600, value))

    def row(self, name: str, unit: str, warm_up_h: float, least: float) -> tuple[object, ...]:
        """Of the table: first and last value, slope an hour and its error, and whether it is beyond noise."""
        rows = [(at_h, value) for at_h, value in self.of[name] if at_h >= warm_up_h]
        values = [value for _, value in rows]
        if len(rows) < _MIN_SAMPLES:
            return (name, unit, *(f"{v:.1f}" for v in (values[:1] + values[-1:])), "-", "-", "too few samples")
        slope, error = slope_of(np.array(rows))
        growth = abs(slope) * (rows[-1][0] - rows[0][0])
        is_beyond = abs(slope) > _ERRORS * error and growth > least
        reply = ("GROWS" if slope > 0 else "falls") if is_beyond else "noise"
        if name == KEPT and is_beyond:
            reply = "keeps for a day"
        return (name, unit, f"{values[0]:.1f}", f"{values[-1]:.1f}", f"{slope:+.2f}", f"{error:.2f}", reply)


def slope_of(rows: np.ndarray) -> tuple[float, float]:
    """The slope of (x, y) rows and its standard error, with as many samples counted as are independent."""
    x, y = rows[:, 0] - rows[:, 0].mean(), rows[:, 1] - rows[:, 1].mean()
    spread = float((x * x).sum())
    slope = float((x * y).sum()) / spread
    left = y - slope * x
    power = float((left * left).sum())
    likeness = float((left[1:] * left[:-1]).sum()) / power if power else 0.0
    likeness = min(0.99, max(0.0, likeness))
    independent = max(3.0, len(x) * (1 - likeness) / (1 + likeness))
    return slope, (power / (independent - 2) / spread) ** 0.5 if independent > 2 else float("inf")


async def soak(cluster: Cluster, options: argparse.Namespace) -> tuple[Samples, list[str]]:
    """Loads it for so long; the samples, and what was sent."""
    await wait_ready(cluster.places, [MODEL])
    probe = await closed_loop(cluster.places, MODEL, options.callers, options.probe)
    capacity = len(probe.latencies_ms()) / (options.probe * 0.8)
    rate = options.rate or capacity * options.load
    print(f"carries {capacity:.0f}/s; soaks at {rate:.0f}/s for {options.minutes:g} min", flush=True)
    samples, client = Samples(), await nats.connect(cluster.nats.url)
    load = OpenLoop(cluster.places, [MODEL], rate)
    sending = asyncio.create_task(load.run())
    durable = asyncio.create_task(_durable(client, options.durable_rate))
    ends_s = time.monotonic() + options.minutes * 60
    sent = answered = failed = 0
    slowest_ms: list[float] = []
    try:
        while time.monotonic() < ends_s:
            await asyncio.sleep(min(options.every, max(0.0, ends_s - time.monotonic())))
            await _sample(cluster, client, samples)
            # What has ended is counted and forgotten: this process must not grow either.
            over = [request for request in load.account.requests if request.is_over]
            load.account.requests[:] = [request for request in load.account.requests if not request.is_over]
            sent, answered = sent + len(over), answered + sum(bool(request.answered_s) for request in over)
            failed += sum(not request.answered_s for request in over)
            slowest_ms.append(quantile(sorted((r.answered_s - r.due_s) * 1000 for r in over if r.answered_s), 0.99))
    finally:
        load.stop()
        durable.cancel()
        await sending
        with contextlib.suppress(asyncio.CancelledError):
            stored = await durable
        await client.close()
    middle = quantile(sorted(slowest_ms), 0.5)
    said = [
        f"{sent:,} requests, {answered:,} answered, {failed} failed; p99 of an interval: {middle:.1f} ms in the middle, "
        f"{max(slowest_ms, default=0.0):.1f} ms at most",
        f"{stored} durable requests stored",
    ]
    return samples, said


async def _durable(client: nats.NATS, rate: float) -> int:
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "INT64", "shape": [1, 1], "data": [7]}]}).encode()
    jetstream, stored = client.jetstream(), 0
    try:
        while rate:
            await asyncio.sleep(1 / rate)
            with contextlib.suppress(NatsError, TimeoutError):
                await jetstream.publish(f"event.{MODEL}", body)
                stored += 1
    except asyncio.CancelledError:
        pass
    return stored


async def _sample(cluster: Cluster, client: nats.NATS, samples: Samples) -> None:
    for name, process in cluster.processes().items():
        with contextlib.suppress(psutil.Error):
            # Children, where a model has any, are part of their worker.
            family = [process, *process.children(recursive=True)]
            samples.add(f"{name} memory", sum(one.memory_info().rss for one in family) / 2**20)
            samples.add(f"{name} descriptors", sum(one.num_fds() for one in family))
    for stream in await client.jetstream().streams_info():
        name = str(stream.config.name)
        if not name.startswith(("KV_", "OBJ_")):
            samples.add(f"stream {name}", stream.state.bytes / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=0.0, help="minutes that are not counted (default: a fifth)")
    parser.add_argument("--load", type=float, default=0.6, help="share of what is carried")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second instead")
    parser.add_argument("--durable-rate", type=float, default=5.0, help="durable requests a second; 0: none")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--probe", type=float, default=5.0, help="seconds in which it is measured what is carried")
    parser.add_argument("--callers", type=int, default=32, help="in that measurement")
    parser.add_argument("--ms", type=float, default=1.0, help="what a batch of up to 8 takes")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        write_sleeper(Path(folder) / "models", MODEL, options.ms, batch=8)
        cluster = Cluster(Path(folder), options.gateways, options.schedulers, options.workers)
        try:
            samples, said = asyncio.run(soak(cluster, options))
        finally:
            cluster.close()
    print(*said, sep="\n")
    warm_up_h = (options.warm_up or options.minutes / 5) / 60
    rows = []
    for name in samples.of:
        is_fds = name.endswith("descriptors")
        rows.append(samples.row(name, "" if is_fds else "MiB", warm_up_h, MIN_FDS if is_fds else MIN_GROWTH_MIB))
    print(table(("of", "unit", "first", "last", "an hour", "error", "verdict"), rows))


if __name__ == "__main__":
    main()
