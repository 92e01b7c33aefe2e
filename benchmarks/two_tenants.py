"""What a tenant feels of another one that offers fifty times as much: `python -m benchmarks.two_tenants` prints a table.

Four instances of a Python model with a fixed time per batch are served by a whole `weir serve`. The requests of the quiet
tenant come evenly spaced, alone and then beside a busy one, which offers more than the model can run: without a policy,
with one (owners take turns in the batches), and with one that also bounds what the busy one has in flight, to full batches
on three of the four instances, and to three requests, so that an instance is always left. `ratio` is the quiet tenant's p99
to its p99 alone on the same server.

With `--simulate` the scheduler alone decides on a virtual clock, where nothing else takes time: a loaded machine changes no
figure.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from heapq import heapify, heappop, heappush
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpc
from tritonclient.utils import InferenceServerException

from benchmarks.cluster.clients import table
from weir import Server
from weir.scheduler.batching.request import NO_FRAME, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.batches import BatchEnded
from weir.schemas.wire.calls import ANYBODY, Caller, RequestEnvelope

EXECUTION_MS = 40.0
BATCH = 4
INSTANCES = 4
QUIET_PER_S = 10.0
TIMES_AS_MUCH = 50
LIMITS = (INSTANCES - 1) * BATCH, INSTANCES - 1

MODEL = f"""
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({EXECUTION_MS / 1000})
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]) for tensor in tensors]
"""
CONFIG = f"""
backend: "python" max_batch_size: {BATCH}
input {{ name: "IN" data_type: TYPE_FP32 dims: 1 }} output {{ name: "OUT" data_type: TYPE_FP32 dims: 1 }}
instance_group {{ kind: KIND_CPU count: {INSTANCES} }} dynamic_batching {{ }}
"""
POLICY = """
roles:
  anonymous: {rules: [{actions: [health]}]}
  quiet: {rules: [{actions: [infer]}]}
  busy: {rules: [{actions: [infer]}], limits: {%s}}
"""
SETTINGS = {"no policy": None, "turns": "", **{f"turns, in_flight {most}": f"in_flight: {most}" for most in LIMITS}}


def write_model(folder: Path) -> None:
    """The model `m` in a repository."""
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.py").write_text(MODEL)
    (folder / "m" / "config.pbtxt").write_text(CONFIG)


def make_key(file: Path, role: str) -> str:
    """A key of this role, kept in `file`."""
    command = [sys.executable, "-m", "weir", "key", "create", role, f"--role={role}", f"--file={file}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Load:
    """Requests of one tenant that come evenly spaced, whether or not the ones before are answered."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else None
        self._input = grpc.InferInput("IN", [1, 1], "FP32")
        self._input.set_data_from_numpy(np.zeros((1, 1), np.float32))
        self.taken_ms: list[float] = []
        self.refused = 0

    async def run(self, per_s: float, seconds: float) -> None:
        """Returns when all have had their responses."""
        async with grpc.InferenceServerClient(self._url) as client:
            began_s = time.perf_counter()
            async with asyncio.TaskGroup() as asked:
                for number in range(int(per_s * seconds)):
                    await asyncio.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
                    asked.create_task(self._ask(client))

    async def _ask(self, client: grpc.InferenceServerClient) -> None:
        began_s = time.perf_counter()
        try:
            await client.infer("m", [self._input], headers=self._headers)
        except InferenceServerException as error:
            if "too many requests in flight" not in error.message():
                raise
            self.refused += 1
        else:
            self.taken_ms.append((time.perf_counter() - began_s) * 1000)


def run(url: str, key: str, per_s: float, seconds: float) -> tuple[list[float], int]:
    """What a tenant gets in a process of its own: latencies of its responses in milliseconds, and how many are refused."""
    load = Load(url, key)
    asyncio.run(load.run(per_s, seconds))
    return load.taken_ms, load.refused


def measure(name: str, url: str, keys: dict[str, str], seconds: float) -> list[tuple[str, ...]]:
    """The rows of one setting: the quiet tenant alone, beside the busy one, and the busy one."""
    with ProcessPoolExecutor(2, get_context("spawn")) as clients:
        clients.submit(run, url, keys["quiet"], QUIET_PER_S, 1).result()
        alone = clients.submit(run, url, keys["quiet"], QUIET_PER_S, seconds).result()
        flood = clients.submit(run, url, keys["busy"], QUIET_PER_S * TIMES_AS_MUCH, seconds + 4)
        time.sleep(4)  # until its requests wait
        quiet = clients.submit(run, url, keys["quiet"], QUIET_PER_S, seconds).result()
        busy = flood.result()
    rows: list[tuple[str, ...]] = []
    alone_ms = np.percentile(alone[0], 99)
    for who, (taken_ms, refused) in (("quiet, alone", alone), ("quiet, beside", quiet), ("busy", busy)):
        p50_ms, p99_ms = np.percentile(taken_ms, [50, 99])
        ratio = "" if who == "busy" else f"{p99_ms / alone_ms:.2f}"
        rows.append((name, who, f"{p50_ms:.1f}", f"{p99_ms:.1f}", ratio, str(len(taken_ms)), str(refused)))
    return rows


def simulated(
    limit: int | None, has_policy: bool, has_busy: bool, seconds: float
) -> tuple[dict[str, list[float]], int]:
    """Latencies of the responses in milliseconds by tenant, on a virtual clock, and how many of the busy are refused."""
    model = ModelScheduler("m")
    tensor = {"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}
    config = {"name": "m", "max_batch_size": BATCH, "input": [tensor], "dynamic_batching": {}}
    model.configure(1, ModelConfig.model_validate(config))
    model.set_instances("w", {1: INSTANCES})
    rates = {"quiet": QUIET_PER_S, **({"busy": QUIET_PER_S * TIMES_AS_MUCH} if has_busy else {})}
    # The quiet tenant's requests come at any time of the busy one's.
    events: list[tuple[int, int, Any]] = [
        (int(1e6 * (number + random.Random(number).random()) / per_s), number, tenant)
        for tenant, per_s in rates.items()
        for number in range(int(per_s * seconds))
    ]
    heapify(events)
    callers = {"quiet": Caller("quiet"), "busy": Caller("busy", limit or 0)} if has_policy else {}
    keys, free_us, taken_ms, refused = count(1), Counter[int](), defaultdict[str, list[float]](list), 0
    tenants: dict[int, str] = {}
    while events:
        now_us, _, event = heappop(events)
        if isinstance(event, str):
            tenants[key := next(keys)] = event
            row = RequestEnvelope(key, -1, 1, "", 0, 0, 0, 0, 0, "", b"")._replace(
                **callers.get(event, ANYBODY)._asdict()
            )
            refused += len(model.enqueue(requests_of("gateway", [row], now_us, NO_FRAME)))
        elif event is not None:
            for request in model.complete(now_us, BatchEnded(event, int(EXECUTION_MS * 1e3)))[0]:
                taken_ms[tenants[request.key]].append((now_us - request.enqueued_us) / 1e3)
        batches, wake_at_us = model.dispatch(now_us)
        for batch in batches:
            number = batch.instance.number
            free_us[number] = max(now_us, free_us[number]) + int(EXECUTION_MS * 1e3)
            heappush(events, (free_us[number], -batch.id, batch.id))
        if wake_at_us is not None:
            heappush(events, (wake_at_us, 0, None))
    return taken_ms, refused


def simulate(seconds: float) -> list[tuple[str, ...]]:
    """The rows of the table on a virtual clock."""
    rows: list[tuple[str, ...]] = []
    alone_ms = float(np.percentile(simulated(None, False, False, seconds)[0]["quiet"], 99))
    for name, limits in SETTINGS.items():
        limit = int(limits.rpartition(" ")[2]) if limits else None
        taken_ms, refused = simulated(limit, limits is not None, True, seconds)
        for tenant in ("quiet", "busy"):
            p50_ms, p99_ms = np.percentile(taken_ms[tenant], [50, 99])
            ratio = f"{p99_ms / alone_ms:.2f}" if tenant == "quiet" else ""
            figures = (f"{p50_ms:.1f}", f"{p99_ms:.1f}", ratio, str(len(taken_ms[tenant])))
            rows.append((name, tenant, *figures, str(refused if tenant == "busy" else 0)))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each row is measured")
    parser.add_argument("--simulate", action="store_true", help="on a virtual clock")
    options = parser.parse_args()
    rows = simulate(options.seconds) if options.simulate else serve(options.seconds)
    print(table(("setting", "tenant", "p50 ms", "p99 ms", "ratio", "responses", "refused"), rows))


def serve(seconds: float) -> list[tuple[str, ...]]:
    """The rows of the table of real servers, one after another."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="tenants-") as name:
        folder = Path(name)
        write_model(folder / "models")
        made = {role: make_key(folder / "keys.json", role) for role in ("quiet", "busy")}
        for setting, limits in SETTINGS.items():
            options: dict[str, Any] = {}
            keys = dict.fromkeys(made, "")
            if limits is not None:
                (folder / "policy.yaml").write_text(POLICY % limits)
                options = {"access_policy": str(folder / "policy.yaml"), "access_keys": str(folder / "keys.json")}
                keys = made
            with Server(folder / "models", **options) as server:
                rows += measure(setting, server.grpc_url, keys, seconds)
    return rows


if __name__ == "__main__":
    main()
