"""How long requests wait that share a worker with many models: `python -m benchmarks.fairness` prints a summary.

Many small models on one worker of one `weir serve`, asked by callers that each wait for their answer before they ask
again, a model drawn by Zipf's law: the most popular gets a large part of all requests, most get few. The longest wait of
each model is what an unlucky caller of it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import tritonclient.grpc.aio as grpc

from weir import Server

MODELS = 200
CALLERS = 32
EXPONENT = 1.0
GRAPH = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 16] IN) => (float[n, 16] OUT) { OUT = Relu(IN) }'
CONFIG = """
backend: "onnxruntime" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 16 } output { name: "OUT" data_type: TYPE_FP32 dims: 16 }
instance_group { kind: KIND_CPU count: 1 } dynamic_batching { }
"""


def write_models(folder: Path) -> None:
    """All alike: `m0` is the most popular."""
    content = onnx.parser.parse_model(GRAPH).SerializeToString()
    for number in range(MODELS):
        model = folder / f"m{number}"
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.onnx").write_bytes(content)
        (model / "config.pbtxt").write_text(CONFIG)


async def ask(url: str, seconds: float) -> list[list[float]]:
    """How long the requests of each model took, in milliseconds."""
    weights = 1 / np.arange(1, MODELS + 1) ** EXPONENT
    random = np.random.default_rng(1)
    taken_ms: list[list[float]] = [[] for _ in range(MODELS)]
    tensor = grpc.InferInput("IN", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 16), np.float32))
    async with grpc.InferenceServerClient(url) as client:
        for number in range(MODELS):
            await client.infer(f"m{number}", [tensor])
        ends_s = time.perf_counter() + seconds

        async def call() -> None:
            for number in random.choice(MODELS, 1_000_000 // CALLERS, p=weights / weights.sum()).tolist():
                began_s = time.perf_counter()
                if began_s > ends_s:
                    return
                await client.infer(f"m{number}", [tensor])
                taken_ms[number].append((time.perf_counter() - began_s) * 1000)

        await asyncio.gather(*(call() for _ in range(CALLERS)))
    return taken_ms


def report(taken_ms: list[list[float]], seconds: float) -> None:
    """Print latency by popularity, and the longest wait per model."""
    every = np.concatenate([times for times in taken_ms if times])
    print(f"{MODELS} models, {CALLERS} callers, {len(every) / seconds:,.0f} requests/s")
    print(f"{'models':>12} {'requests':>9} {'p50 ms':>9} {'p99 ms':>9} {'longest':>9}")
    ranks = [0, 1, 10, 50, 100, MODELS]
    for first, behind in pairwise(ranks):
        times = np.concatenate([np.array(times) for times in taken_ms[first:behind]])
        p50, p99, longest = np.percentile(times, [50, 99, 100]) if len(times) else (0.0, 0.0, 0.0)
        print(f"{f'm{first}-m{behind - 1}':>12} {len(times):>9} {p50:>9.2f} {p99:>9.2f} {longest:>9.2f}")
    longest_ms = [max(times) for times in taken_ms if times]
    p50, p90, most = np.percentile(longest_ms, [50, 90, 100])
    print(f"longest wait per model: half below {p50:.1f} ms, nine of ten below {p90:.1f} ms, the longest {most:.1f} ms")
    print(f"models that were not asked: {sum(not times for times in taken_ms)}")


def main() -> None:
    """Print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the models are asked")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        with Server(folder) as server:
            taken_ms = asyncio.run(ask(server.grpc_url, seconds))
    report(taken_ms, seconds)


if __name__ == "__main__":
    main()
