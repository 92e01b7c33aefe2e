"""Throughput by the number of workers: `python -m benchmarks.worker_scaling` prints a table.

The model takes a fixed time without using a processor, so that a machine of two cores does not limit the workers. Roles
are separate processes on one nats-server. *Ideal* is the capacity of the instances without any overhead; `of the first`
compares with the first row of the same batch size, multiplied by the number of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.cluster.clients import closed_loop, quantile, table, wait_ready
from benchmarks.cluster.roles import Cluster, write_sleeper


def measure(
    folder: Path, workers: int, batch: int, options: argparse.Namespace, one_s: dict[int, float]
) -> tuple[object, ...]:
    """One row of the table. `one_s` has the rate of one worker, by batch size, once it was measured."""
    instances = options.instances
    write_sleeper(folder / "models", "sleeper", options.ms, batch, instances)
    cluster = Cluster(folder, gateways=options.gateways, workers=workers)
    try:
        asyncio.run(wait_ready(cluster.places, ["sleeper"]))
        slots = workers * instances * batch
        before_s, own_s, began_s = cluster.cpu_s(), _own_cpu_s(), time.monotonic()
        # Two batches for each instance, the executing one and a staged one, and half a batch of those on their way.
        under_way = max(2, int(slots * 2.5))
        account = asyncio.run(closed_loop(cluster.places, "sleeper", under_way, options.seconds))
        took_s = time.monotonic() - began_s
        cores, client_cores = (cluster.cpu_s() - before_s) / took_s, (_own_cpu_s() - own_s) / took_s
    finally:
        cluster.close()
    latencies = account.latencies_ms()
    errors = sum(bool(request.error) for request in account.requests)
    rate = len(latencies) / (options.seconds * 0.8)
    linear = slots / (options.ms / 1000)
    each = one_s.setdefault(batch, rate / workers)
    return (
        batch,
        workers,
        f"{rate:.0f}",
        f"{linear:.0f}",
        f"{rate / linear:.1%}",
        f"{rate / each / workers:.1%}",
        f"{quantile(latencies, 0.5):.1f}",
        f"{quantile(latencies, 0.99):.1f}",
        f"{cores:.2f}",
        f"{client_cores:.2f}",
        errors,
    )


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="1,2,4", help="how many, separated by commas")
    parser.add_argument("--batches", default="1,8", help="batch sizes, separated by commas")
    parser.add_argument("--ms", type=float, default=10.0, help="what a batch takes")
    parser.add_argument("--instances", type=int, default=1, help="of the model on each worker")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of load for each row; the first fifth is not counted"
    )
    options = parser.parse_args()
    rows, one_s = [], {}
    for batch in map(int, options.batches.split(",")):
        for workers in map(int, options.workers.split(",")):
            with tempfile.TemporaryDirectory(prefix="worker-scaling-") as folder:
                rows.append(measure(Path(folder), workers, batch, options, one_s))
    head = (
        "batch",
        "workers",
        "requests/s",
        "ideal",
        "of ideal",
        "of the first",
        "p50 ms",
        "p99 ms",
        "cores",
        "client",
        "errors",
    )
    print(f"a batch takes {options.ms:g} ms, {options.instances} instances a worker, {os.cpu_count()} processors")
    print(table(head, rows))


if __name__ == "__main__":
    main()
