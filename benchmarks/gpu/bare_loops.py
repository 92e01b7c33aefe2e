"""The engine without a server: threads that copy a batch in, run it and copy the output out in a loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Step = Callable[[], None]
"""One batch there and back."""


def bare_rate(make_step: Callable[[], Step], threads: int, batch: int, seconds: float) -> float:
    """Rows a second of `threads` loops, each with a step of its own."""
    ready, counts, stop = threading.Barrier(threads + 1), [0] * threads, threading.Event()

    def loop(number: int) -> None:
        step = make_step()
        for _ in range(3):
            step()
        ready.wait()
        while not stop.is_set():
            step()
            counts[number] += 1

    loops = [threading.Thread(target=loop, args=(number,)) for number in range(threads)]
    for thread in loops:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for thread in loops:
        thread.join()
    return sum(counts) * batch / (time.perf_counter() - began)


def bare_p50_ms(make_step: Callable[[], Step], seconds: float) -> float:
    """The median time of one step in one loop."""
    step, times = make_step(), list[float]()
    for _ in range(3):
        step()
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def torch_steps(file: Path, rows: np.ndarray, on_gpu: bool) -> Callable[[], Step]:
    """Steps of one TorchScript module, each on a stream of its own."""
    import torch

    if not on_gpu:
        torch.set_num_threads(1)  # as instances have
    module = torch.jit.load(str(file), map_location="cuda" if on_gpu else "cpu").eval()

    def make() -> Step:
        source = torch.from_numpy(rows)
        if not on_gpu:
            return lambda: _on_cpu(module, source)
        source, stream = source.pin_memory(), torch.cuda.Stream()
        target: list[Any] = []

        def step() -> None:
            with torch.inference_mode(), torch.cuda.stream(stream):
                answer = module(source.to("cuda", non_blocking=True))
                if not target:
                    target.append(torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True))
                target[0].copy_(answer, non_blocking=True)
            stream.synchronize()

        return step

    def _on_cpu(module: Any, source: Any) -> None:
        with torch.inference_mode():
            module(source)

    return make


def onnx_steps(file: Path, rows: np.ndarray, on_gpu: bool) -> Callable[[], Step]:
    """Steps of ONNX Runtime, each of a session of its own, as the worker has them on GPUs."""
    import onnxruntime

    provider = "CUDAExecutionProvider" if on_gpu else "CPUExecutionProvider"
    if on_gpu:
        import torch  # noqa: F401 - brings CUDA's libraries along

    def make() -> Step:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(file), options, providers=[provider])
        if session.get_providers()[0] != provider:
            raise RuntimeError(f"ONNX Runtime fell back to {session.get_providers()[0]}")

        def step() -> None:
            session.run(None, {"INPUT": rows})

        return step

    return make


def tensorrt_steps(file: Path, rows: np.ndarray, on_gpu: bool) -> Callable[[], Step]:
    """Steps of one TensorRT engine, each with a context and a stream of its own; torch has the memory."""
    import tensorrt as trt
    import torch

    engine = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(file.read_bytes())

    def make() -> Step:
        context, stream = engine.create_execution_context(), torch.cuda.Stream()
        source = torch.from_numpy(rows).pin_memory()
        on_device = torch.empty_like(source, device="cuda")
        context.set_input_shape("INPUT", rows.shape)
        output = torch.empty(tuple(context.get_tensor_shape("OUTPUT")), device="cuda")
        target = torch.empty_like(output, device="cpu", pin_memory=True)
        context.set_tensor_address("INPUT", on_device.data_ptr())
        context.set_tensor_address("OUTPUT", output.data_ptr())

        def step() -> None:
            with torch.cuda.stream(stream):
                on_device.copy_(source, non_blocking=True)
                context.execute_async_v3(stream.cuda_stream)
                target.copy_(output, non_blocking=True)
            stream.synchronize()

        return step

    return make


STEPS = {"pytorch": torch_steps, "onnxruntime": onnx_steps, "tensorrt": tensorrt_steps}
"""By backend: what makes the steps of a file, for an array of rows, on a GPU or a CPU."""
