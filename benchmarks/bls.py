"""What a call of a Python model to another model (BLS) adds, by tensor size.

Two Python models are served by one `weir serve`: `inner` answers with its input, `outer` asks `inner` by
`InferenceRequest.exec` and answers with what came back, and with how long that took. One client asks one request at a
time, `inner` and `outer` in turns, over HTTP.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http as triton

import weir

SIZES_BYTES = (64, 602_112)
SECONDS = 5.0
TURN = 20

CONFIG = """
backend: "python"
input [{{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }}]
output [{{ name: "OUT" data_type: TYPE_UINT8 dims: [-1] }}{more}]
"""
TIME = ', { name: "ASKED_US" data_type: TYPE_FP64 dims: [1] }'

INNER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""

OUTER = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        began = time.perf_counter()
        inner = pb_utils.InferenceRequest(
            model_name="inner", inputs=request.inputs(), requested_output_names=["OUT"]
        )
        response = inner.exec()
        asked_us = np.array([(time.perf_counter() - began) * 1e6])
        return pb_utils.InferenceResponse([*response.output_tensors(), pb_utils.Tensor("ASKED_US", asked_us)])
"""


def write_model(root: Path, name: str, config: str, source: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    (root / name / "1" / "model.py").write_text(source)


def cpu_us(pids: list[int]) -> float:
    """Time that all threads of these processes have spent on a CPU."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


def measure(client: triton.InferenceServerClient, pids: list[int], size: int) -> None:
    content = np.arange(size, dtype=np.uint8)
    tensor = triton.InferInput("IN", [size], "UINT8")
    tensor.set_data_from_numpy(content)
    for model in ("inner", "outer"):
        for _ in range(TURN):
            assert np.array_equal(client.infer(model, [tensor]).as_numpy("OUT"), content)
    took_us: dict[str, list[float]] = {"inner": [], "outer": [], "asked": []}
    spent_us = {"inner": 0.0, "outer": 0.0}
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        for model in ("inner", "outer"):
            spent_before_us = cpu_us(pids)
            for _ in range(TURN):
                began = time.perf_counter()
                result = client.infer(model, [tensor])
                took_us[model].append((time.perf_counter() - began) * 1e6)
                if model == "outer":
                    took_us["asked"].append(float(result.as_numpy("ASKED_US")[0]))
            spent_us[model] += cpu_us(pids) - spent_before_us
    inner, outer, asked = (statistics.median(took_us[name]) for name in ("inner", "outer", "asked"))
    cpu_inner, cpu_outer = (spent_us[name] / len(took_us[name]) for name in ("inner", "outer"))
    figures = (inner, outer, outer - inner, asked, cpu_inner, cpu_outer, cpu_outer - cpu_inner)
    print(f"{size:>8}", *(f"{figure:>9.0f}" for figure in figures))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_model(root, "inner", CONFIG.format(more=""), INNER)
        write_model(root, "outer", CONFIG.format(more=TIME), OUTER)
        with (
            weir.Server(model_repository=folder) as server,
            triton.InferenceServerClient(server.http_address) as client,
        ):
            pids = [process.pid for process in psutil.Process(server.pid).children(recursive=True)]
            print("us a request: median latency, and CPU of all processes of the server; `exec` is measured in outer")
            heads = ("inner", "outer", "added", "exec", "CPU inner", "CPU outer", "CPU added")
            print(f"{'bytes':>8}", *(f"{head:>9}" for head in heads))
            for size in SIZES_BYTES:
                measure(client, pids, size)


if __name__ == "__main__":
    main()
