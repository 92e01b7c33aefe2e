"""What one `execute` of a Python model costs, both processes together, by tensor size."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from schemas.tensors import Tensor
from worker.backends.python_process import PythonProcess, PythonRequest

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", tensor.as_numpy())]))
        return responses
"""


def cpu_seconds(pid: int) -> float:
    """Time the threads of a process have spent on a CPU, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def measure(process: PythonProcess, size: int, batch: int, seconds: float) -> None:
    tensor = Tensor.from_numpy("INPUT", np.arange(size, dtype=np.uint8).reshape(1, size), "UINT8")
    requests = [PythonRequest(inputs=[tensor]) for _ in range(batch)]
    assert process.pid is not None
    for _ in range(20):
        process.execute(requests)
    before = (time.perf_counter(), cpu_seconds(os.getpid()), cpu_seconds(process.pid))
    rounds = 0
    while time.perf_counter() - before[0] < seconds:
        process.execute(requests)
        rounds += 1
    after = (time.perf_counter(), cpu_seconds(os.getpid()), cpu_seconds(process.pid))
    wall, parent, child = ((late - early) / rounds * 1e6 for late, early in zip(after, before, strict=True))
    print(f"{size:>9} {batch:>6} {wall:>9.1f} {parent:>10.1f} {child:>9.1f} {parent + child:>9.1f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "identity" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(IDENTITY)
        process = PythonProcess(version.parent, 1, "model.py", {"model_name": "identity"})
        began = time.perf_counter()
        process.start(30)
        print(f"start: {(time.perf_counter() - began) * 1000:.0f} ms")
        print(f"{'bytes':>9} {'batch':>6} {'wall us':>9} {'parent us':>10} {'child us':>9} {'CPU us':>9}")
        for size, batch in [(64, 1), (64, 16), (65_536, 1), (65_537, 1), (602_112, 1), (602_112, 8), (2_000_000, 1)]:
            measure(process, size, batch, 1.0)
        process.stop(5)


if __name__ == "__main__":
    main()
