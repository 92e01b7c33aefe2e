"""A ResNet-50-sized network on a GPU: images per second through the whole server, beside the bare engine.

    python -m benchmarks.gpu [--seconds 3] [--batches 1 8 64] [--instances 1 2 4]

Each request carries one batch in shared memory, as for images from a decoder on the same host. Both loops copy the
batch to the GPU and the output back. `--device cpu --width 4 --image 32` tries the benchmark without a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import shared_memory

import weir
from benchmarks.gpu.bare_loops import bare_rate, onnx_steps, torch_steps

BACKENDS = {"pytorch": ("model.pt", torch_steps), "onnxruntime": ("model.onnx", onnx_steps)}

CONFIG = """
backend: "{backend}"
max_batch_size: {batch}
input [{{ name: "INPUT" data_type: TYPE_FP32 dims: [3, {image}, {image}] }}]
output [{{ name: "OUTPUT" data_type: TYPE_FP32 dims: [1000] }}]
instance_group [{{ count: {count} kind: {kind} }}]
"""


def write_models(root: Path, chosen: argparse.Namespace) -> None:
    """One model for each backend and number of instances, all of the same weights."""
    import torch

    from benchmarks.gpu.residual_network import ResidualNetwork

    torch.manual_seed(7)
    network = ResidualNetwork(chosen.width).eval()
    example = torch.zeros(2, 3, chosen.image, chosen.image)
    files = {"pytorch": root / "model.pt", "onnxruntime": root / "model.onnx"}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # both ways of writing are deprecated, and say so
        torch.jit.freeze(torch.jit.trace(network, example)).save(str(files["pytorch"]))
        if "onnxruntime" in chosen.backends:
            names: dict[str, Any] = {"input_names": ["INPUT"], "output_names": ["OUTPUT"]}
            axes = {"INPUT": {0: "batch"}, "OUTPUT": {0: "batch"}}
            torch.onnx.export(network, (example,), str(files["onnxruntime"]), dynamo=False, dynamic_axes=axes, **names)
    for backend in chosen.backends:
        for count in chosen.instances:
            version = root / "models" / f"{backend}_{count}" / "1"
            version.mkdir(parents=True)
            (version / files[backend].name).hardlink_to(files[backend])
            fields = {"backend": backend, "batch": max(chosen.batches), "image": chosen.image, "count": count}
            kind = "KIND_GPU" if chosen.device == "cuda" else "KIND_CPU"
            (version.parent / "config.pbtxt").write_text(CONFIG.format(kind=kind, **fields))


def served_rate(server: weir.Server, model: str, images: np.ndarray, callers: int, seconds: float) -> float:
    """Images a second of `callers` clients that send one batch after the other, each from its own shared memory."""
    ready, counts, stop = threading.Barrier(callers + 1), [0] * callers, threading.Event()

    def call(number: int) -> None:
        name = f"images-{number}"
        region = shared_memory.create_shared_memory_region(name, f"/images-{number}", images.nbytes)
        with triton.InferenceServerClient(server.grpc_url) as client:
            try:
                shared_memory.set_shared_memory_region(region, [images])
                client.register_system_shared_memory(name, f"/images-{number}", images.nbytes)
                tensor = triton.InferInput("INPUT", list(images.shape), "FP32")
                tensor.set_shared_memory(name, images.nbytes)
                for _ in range(3):
                    client.infer(model, [tensor])
                ready.wait()
                while not stop.is_set():
                    client.infer(model, [tensor])
                    counts[number] += 1
                client.unregister_system_shared_memory(name)
            except Exception:
                ready.abort()  # whoever waits is to fail too
                raise
            finally:
                shared_memory.destroy_shared_memory_region(region)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(counts) * len(images) / (time.perf_counter() - began)


class Utilization:
    """The GPU's utilisation in per cent and its power in watts, each the mean while this is open."""

    def __init__(self, on_gpu: bool) -> None:
        self._nvml: Any = None
        if on_gpu:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._readings: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Utilization:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def __str__(self) -> str:
        if not self._readings:
            return "-"
        percent, watts = np.mean(self._readings, axis=0)
        return f"{percent:.0f} % {watts:.0f} W"

    def _read(self) -> None:
        while self._nvml is not None and not self._ended.wait(0.1):
            percent = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            self._readings.append((percent, self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000))


def measure(server: weir.Server, root: Path, chosen: argparse.Namespace) -> None:
    """Prints a line for each backend, number of instances and batch."""
    on_gpu = chosen.device == "cuda"
    print(f"{'backend':<12}{'instances':>10}{'batch':>7}{'bare/s':>10}{'served/s':>10}{'ratio':>7}  GPU while serving")
    for backend in chosen.backends:
        file, steps = BACKENDS[backend]
        for count in chosen.instances:
            for batch in chosen.batches:
                shape = (batch, 3, chosen.image, chosen.image)
                images = np.random.default_rng(7).standard_normal(shape, dtype=np.float32)
                bare = bare_rate(steps(root / file, images, on_gpu), count, batch, chosen.seconds)
                with Utilization(on_gpu) as used:
                    served = served_rate(server, f"{backend}_{count}", images, 2 * count + 1, chosen.seconds)
                row = f"{backend:<12}{count:>10}{batch:>7}{bare:>10.0f}{served:>10.0f}{served / bare:>7.2f}  {used}"
                print(row, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    options = argparse.ArgumentParser()
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--backends", nargs="+", choices=tuple(BACKENDS), default=list(BACKENDS))
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    options.add_argument("--instances", nargs="+", type=int, default=[1, 2, 4])
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--image", type=int, default=224)
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), chosen)
        with weir.Server(Path(folder) / "models", start_timeout_s=300, allow_client_shm=True) as server:
            measure(server, Path(folder), chosen)


if __name__ == "__main__":
    main()
