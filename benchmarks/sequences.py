"""Thousands of live sequences through a running server: `python -m benchmarks.sequences`.

The benchmark starts `weir serve` with an ONNX accumulator whose sum is implicit state, opens the sequences, and sends
each step when the previous one is answered, over gRPC streams of several client processes. Every response is checked:
it must be the sum of its own sequence and arrive in request order. With `--checkpoint-every` states are checkpointed,
with `--kill-after` seconds the worker is killed.

`--policy` measures the scheduler core without a server: requests per second with that many live sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import psutil
from onnx import TensorProto, helper, save
from tritonclient import grpc
from tritonclient.grpc import aio

from weir.scheduler.batching.request import NO_FRAME, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.batches import BatchEnded
from weir.schemas.wire.calls import RequestEnvelope

STREAM_SEQUENCES = 250
"""Sequences that share a stream."""

MODEL = "accumulator"
CONFIG = """
backend: "onnxruntime"
max_batch_size: 64
input { name: "IN" data_type: TYPE_FP64 dims: [1] }
output { name: "OUT" data_type: TYPE_FP64 dims: [1] }
instance_group [{ count: 2 kind: KIND_CPU }]
sequence_batching {
  oldest { max_candidate_sequences: %d }
  max_sequence_idle_microseconds: 600000000
  state [{
    input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP64 dims: [1]
    initial_state: { name: "zero" data_type: TYPE_FP64 dims: [1] zero_data: true }
  }]
}
%s
"""
CHECKPOINTS = 'parameters { key: "weir_checkpoint_every" value { string_value: "%d" } }'


def write_model(root: Path, slots: int, checkpoint_every: int) -> None:
    """The repository with the accumulator, whose instances hold so many sequences each."""
    (root / MODEL / "1").mkdir(parents=True)
    checkpoints = CHECKPOINTS % checkpoint_every if checkpoint_every else ""
    (root / MODEL / "config.pbtxt").write_text(CONFIG % (slots, checkpoints))
    tensors = {
        name: helper.make_tensor_value_info(name, TensorProto.DOUBLE, ["batch", 1])
        for name in ("IN", "SUM_IN", "OUT", "SUM_OUT")
    }
    nodes = [
        helper.make_node("Add", ["IN", "SUM_IN"], ["SUM_OUT"]),
        helper.make_node("Identity", ["SUM_OUT"], ["OUT"]),
    ]
    graph = helper.make_graph(nodes, "graph", [tensors["IN"], tensors["SUM_IN"]], [tensors["OUT"], tensors["SUM_OUT"]])
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        root / MODEL / "1" / "model.onnx",
    )


async def drive(address: str, sequences: range, steps: int) -> Counter[str]:
    """One stream with all these sequences; what came of it, by kind."""
    outcome: Counter[str] = Counter()
    queue: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    sums = dict.fromkeys(sequences, 0.0)
    received = dict.fromkeys(sequences, 0)
    for sequence in sequences:
        queue.put_nowait((sequence, 0))
    left = len(sequences)

    async def requests():  # type: ignore[no-untyped-def]
        while left:
            sequence, step = await queue.get()
            if sequence == 0:
                return
            tensor = grpc.InferInput("IN", [1, 1], "FP64")
            value = float(sequence * 1000 + step)
            sums[sequence] += value
            tensor.set_data_from_numpy(np.array([[value]]))
            yield {
                "model_name": MODEL,
                "inputs": [tensor],
                "request_id": f"{sequence}.{step}",
                "sequence_id": sequence,
                "sequence_start": step == 0,
                "sequence_end": step == steps - 1,
            }

    # A connection of its own, as another client would have.
    async with aio.InferenceServerClient(address, channel_args=[("grpc.use_local_subchannel_pool", 1)]) as client:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                outcome[f"error: {error.message()[:90]}"] += 1
                left -= 1  # its sequence is over: nothing more is sent for it
            else:
                sequence, step = map(int, result.get_response().id.split("."))
                outcome["answers"] += 1
                outcome["order violations"] += step != received[sequence]
                outcome["state mix-ups"] += float(result.as_numpy("OUT")[0, 0]) != sums[sequence]
                received[sequence] = step + 1
                if step + 1 < steps:
                    queue.put_nowait((sequence, step + 1))
                else:
                    left -= 1
            if not left:
                queue.put_nowait((0, 0))
                break
    return outcome


async def _drive_all(address: str, sequences: range, steps: int) -> Counter[str]:
    streams = -(-len(sequences) // STREAM_SEQUENCES)
    outcomes = await asyncio.gather(*(drive(address, sequences[n::streams], steps) for n in range(streams)))
    return sum(outcomes, Counter[str]())


def _client(address: str, sequences: range, steps: int) -> tuple[Counter[str], float, float]:
    begin_s = time.time()
    return asyncio.run(_drive_all(address, sequences, steps)), begin_s, time.time()


def measure(live: int, steps: int, clients: int, checkpoint_every: int, kill_after_s: float) -> None:
    """Starts a server, drives it, and prints what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "models")
        write_model(root, live, checkpoint_every)
        command = [
            sys.executable,
            "-m",
            "weir",
            "serve",
            f"--model-repository={root}",
            "--http-port=0",
            "--grpc-port=0",
        ]
        with Path(folder, "log").open("wb") as log:
            server = subprocess.Popen([*command, "--metrics-port=0"], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            address = _grpc_address(server)
            with multiprocessing.get_context("spawn").Pool(clients) as pool:
                shares = [range(1 + client, live + 1, clients) for client in range(clients)]
                running = pool.starmap_async(_client, [(address, share, steps) for share in shares])
                if kill_after_s:
                    time.sleep(kill_after_s)
                    _kill_worker(server)
                outcomes, begins_s, ends_s = zip(*running.get(), strict=True)
                outcome = sum(outcomes, Counter[str]())
                took_s = max(ends_s) - min(begins_s)
        finally:
            server.terminate()
            server.wait()
    answers = outcome.pop("answers", 0)
    print(f"{live} live sequences x {steps} steps, {clients} clients: {answers} answers in {took_s:.1f} s")
    print(f"  {answers / took_s:.0f} requests/s")
    for name in ("order violations", "state mix-ups"):
        print(f"  {outcome.pop(name, 0)} {name}")
    print(f"  {sum(outcome.values())} sequences ended with an error")
    for name, number in outcome.items():
        print(f"    {number} x {name}")


def _grpc_address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        found = re.match(r"\s*gRPC +(\S+)", line)
        if found:
            return found[1]
    raise SystemExit("the server did not start")


def _kill_worker(server: subprocess.Popen[str]) -> None:
    for child in psutil.Process(server.pid).children():
        if "worker" in " ".join(child.cmdline()).split():
            os.kill(child.pid, signal.SIGKILL)


def policy_requests_per_s(live: int, batches: int = 20_000) -> float:
    """The scheduler core alone, with so many live sequences, each of which always has a request that waits or runs."""
    config = ModelConfig.model_validate(
        {
            "name": MODEL,
            "max_batch_size": 64,
            "sequence_batching": {
                "oldest": {"max_candidate_sequences": live},
                "max_sequence_idle_microseconds": 10**9,
            },
        }
    )
    model = ModelScheduler(MODEL)
    model.configure(1, config)
    model.set_instances("worker", {1: 4})
    keys, times = count(), count(1)

    def send(sequence: int, flags: int) -> None:
        part = RequestEnvelope(next(keys), -1, 1, "", 0, 0, 0, sequence, flags, "", b"body")
        model.enqueue(requests_of("gateway", [part], next(times), NO_FRAME))

    for sequence in range(1, live + 1):
        send(sequence, 1)
    served = 0
    begin = time.perf_counter()
    running = model.dispatch(next(times))[0]
    for _ in range(batches):
        batch = running.pop(0)
        model.complete(next(times), BatchEnded(batch.id, 100))
        served += len(batch.requests)
        for request in batch.requests:
            send(int(request.correlation_id), 0)
        running += model.dispatch(next(times))[0]
        if served >= 200_000:
            break
    return served / (time.perf_counter() - begin)


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--kill-after", type=float, default=0.0, metavar="S")
    parser.add_argument("--policy", action="store_true")
    options = parser.parse_args()
    if options.policy:
        for live in (50, 500, options.sequences):
            print(f"{live} live sequences: {policy_requests_per_s(live):.0f} requests/s of the scheduler core")
        return
    measure(options.sequences, options.steps, options.clients, options.checkpoint_every, options.kill_after)


if __name__ == "__main__":
    main()
