"""Sections that break, load and unload models, and that share the memory of a GPU with a client."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as triton

import weir
from benchmarks.gpu.clients import shared_input
from benchmarks.gpu.networks import Network, network, write_files, write_model
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Section

BACKENDS = Path(__file__).parent / "backends"

DOUBLING = """
backend: "breaking"
max_batch_size: 8
input [{{ name: "INPUT" data_type: TYPE_FP32 dims: [4] }}]
output [{{ name: "OUTPUT" data_type: TYPE_FP32 dims: [4] }}]
instance_group [{{ count: 1 kind: {kind} }}]
"""


def device_error(plan: Plan) -> Section:
    """Breaks the GPU for its worker, several times, under requests."""
    section = Section(
        "device_error",
        "A device error",
        "A kernel writes outside of its memory, after which CUDA does nothing more in that process. The request "
        "runs again in the "
        "worker that is started in its place. (On a CPU the process is killed.)",
        ("round", "answer", "usual ms", "with the error ms"),
    )
    if importlib.util.find_spec("torch") is None:
        section.note("Left out: the module torch is not installed.")
        return section
    folder = plan.folder / "device_error" / "models"
    (folder / "doubling" / "1").mkdir(parents=True)
    (folder / "doubling" / "config.pbtxt").write_text(DOUBLING.format(kind=plan.kind))
    given = np.arange(4, dtype=np.float32)[None]
    with weir.Server(folder, start_timeout_s=300, backend_directory=[str(BACKENDS)]) as server:
        for number in range(3):
            times_ms: list[float] = []
            for breaks in (False, False, True):
                if breaks:
                    (folder / "doubling" / "break").touch()
                began_s = time.perf_counter()
                answer = server.infer("doubling", {"INPUT": given + number})["OUTPUT"]
                times_ms.append((time.perf_counter() - began_s) * 1e3)
                if not np.array_equal(answer, (given + number) * 2):
                    raise RuntimeError(f"the answer is wrong: {answer}")
            if (folder / "doubling" / "break").exists():
                raise RuntimeError("nothing broke")
            section.add(number + 1, "right", times_ms[1], times_ms[2])
    return section


def memory(plan: Plan) -> Section:
    """The memory in use before and after many loads and unloads."""
    section = Section(
        "memory",
        "Memory over loads and unloads",
        "A model is loaded, asked once and unloaded again and again. The memory is that of the GPU (on a CPU, of "
        "the worker), "
        "each time without the model.",
        ("backend", "after the first MiB", f"after {plan.loads} MiB", "growth a load MiB"),
    )
    chosen = network("residual", plan)
    folder = plan.folder / "memory"
    backends = [name for name in ("pytorch", "onnxruntime") if name in plan.backends and _is_installed(name)]
    files = write_files(chosen, folder, set(backends), 8)
    for backend in backends:
        write_model(folder / "models", backend, backend, files[backend], chosen, batch=8, count=1, kind=plan.kind)
    with weir.Server(folder / "models", start_timeout_s=300, model_control_mode="explicit") as server:
        rows = chosen.rows(2)
        for backend in backends:
            used_mib: list[float] = []
            for _ in range(plan.loads):
                if not plan.has_time:
                    section.note("The time was over before all loads were made.")
                    break
                server.load(backend)
                server.infer(backend, {"INPUT": rows})
                server.unload(backend)
                used_mib.append(_used_mib(plan))
            growth = (used_mib[-1] - used_mib[0]) / max(1, len(used_mib) - 1)
            section.add(backend, f"{used_mib[0]:.0f}", f"{used_mib[-1]:.0f}", growth)
    return section


def _is_installed(backend: str) -> bool:
    return importlib.util.find_spec({"pytorch": "torch"}.get(backend, backend)) is not None


def _used_mib(plan: Plan) -> float:
    if plan.on_gpu:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / 2**20
    children = psutil.Process().children(recursive=True)
    workers = [child for child in children if "worker" in " ".join(child.cmdline()) or "worker" in child.name()]
    return sum(child.memory_info().rss for child in workers or children) / 2**20


def client_memory(plan: Plan) -> Section:
    """The same requests with tensors in the message, in system shared memory, and in the GPU's memory of a torch client."""
    section = Section(
        "client_memory",
        "Memory of a client",
        "Requests a second of one client of the residual network in PyTorch: tensors in the message, in system "
        "shared memory, and "
        "in CUDA memory of the client (a tensor of torch), which never leaves the GPU.",
        ("batch", "in the message", "system memory", "CUDA memory"),
    )
    chosen = network("residual", plan)
    folder = plan.folder / "client_memory"
    file = write_files(chosen, folder, {"pytorch"}, max(plan.batches))["pytorch"]
    fields = {"batch": max(plan.batches), "count": 1, "kind": plan.kind}
    write_model(folder / "models", "network", "pytorch", file, chosen, **fields)
    with (
        weir.Server(folder / "models", start_timeout_s=300, allow_client_shm=True) as server,
        triton.InferenceServerClient(server.grpc_url) as client,
    ):
        for batch in plan.batches:
            rows = chosen.rows(batch)
            inline = triton.InferInput("INPUT", list(rows.shape), "FP32")
            inline.set_data_from_numpy(rows)
            expected = client.infer("network", [inline]).as_numpy("OUTPUT")
            in_message = _rate(client, [inline], None, plan.seconds)
            with shared_input(client, rows) as tensor:
                system = _rate(client, [tensor], None, plan.seconds)
            cuda = "-"
            if plan.on_gpu:
                with _in_torch(client, chosen, rows) as (tensor, output, read):
                    cuda = f"{_rate(client, [tensor], [output], plan.seconds):.0f}"
                    np.testing.assert_allclose(read(), expected, rtol=1e-2, atol=1e-3)
            section.add(batch, f"{in_message:.0f}", f"{system:.0f}", cuda)
    if not plan.on_gpu:
        section.note("CUDA memory of a client needs a GPU, and is not rehearsed on a CPU.")
    return section


def _rate(client: Any, inputs: list[Any], outputs: list[Any] | None, seconds: float) -> float:
    for _ in range(3):
        client.infer("network", inputs, outputs=outputs)
    count, began_s = 0, time.perf_counter()
    while not count or time.perf_counter() < began_s + seconds:
        client.infer("network", inputs, outputs=outputs)
        count += 1
    return count / (time.perf_counter() - began_s)


@contextmanager
def _in_torch(client: Any, chosen: Network, rows: np.ndarray) -> Iterator[tuple[Any, Any, Any]]:
    """An input and an output in tensors of torch, and a function that reads the output."""
    import base64
    import ctypes

    import torch
    from cuda.bindings import driver, runtime

    def handle_of(tensor: Any) -> tuple[bytes, int]:
        """The handle of the allocation around a tensor, and the tensor's offset in it: torch allocates in large blocks."""
        status, base, _ = driver.cuMemGetAddressRange(tensor.data_ptr())
        assert not int(status), status
        status, handle = runtime.cudaIpcGetMemHandle(int(base))
        assert not int(status), status
        return bytes((ctypes.c_char * 64).from_address(handle.getPtr())), tensor.data_ptr() - int(base)

    given = torch.from_numpy(rows).cuda()
    taken = torch.empty((len(rows), *chosen.output_dims), device="cuda")
    torch.cuda.synchronize()
    tensor = triton.InferInput("INPUT", list(rows.shape), "FP32")
    output = triton.InferRequestedOutput("OUTPUT")
    for name, memory_of, place in (("torch-in", given, tensor), ("torch-out", taken, output)):
        handle, offset = handle_of(memory_of)
        size = memory_of.numel() * memory_of.element_size()
        client.register_cuda_shared_memory(name, base64.b64encode(handle), 0, offset + size)
        place.set_shared_memory(name, size, offset)
    try:
        yield tensor, output, lambda: taken.cpu().numpy()
    finally:
        client.unregister_cuda_shared_memory()


def clear(folder: Path) -> None:
    """Removes the models of a section, whose files are large."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and path.name != "results":
            shutil.rmtree(path)
