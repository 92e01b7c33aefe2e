"""Names and behaviour of the real onnxruntime-gpu that the backend relies on, checked on a machine without a GPU.

In a process of its own, for it takes the place of the package that the tests run with. The wheel lies in a folder beside
the tests' packages (`make gpu-wheels`).
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weir.worker.backends.onnxruntime.options import CUDA_OPTIONS

WHEELS = Path(sys.prefix) / "gpu-wheels"

pytestmark = pytest.mark.skipif(
    not (WHEELS / "onnxruntime").is_dir(), reason="onnxruntime-gpu is not there: its folder gpu-wheels was not made"
)

_SCRIPT = """
import inspect, json, sys
from pathlib import Path
import numpy as np
import onnxruntime
from onnx import TensorProto
from tests.support.models.onnx_files import graph, version
from weir.schemas.core.errors import WeirError
from weir.worker.backends.onnxruntime.gpu_runner import OnnxDeviceRunner, open_device_runner
from weir.worker.backends.onnxruntime.session import installation
from weir.worker.backends.onnxruntime.options import SHRINKAGE, OnnxOptions
from weir.worker.backends.onnxruntime.session import open_session

root = Path(sys.argv[1])
seen = {"file": onnxruntime.__file__, "installation": installation()}

# Arguments by name, as the backend and its fake have them.
def arguments(call):
    return [name for name in inspect.signature(call).parameters if name != "self"]

binding_type, session_type = onnxruntime.IOBinding, onnxruntime.InferenceSession
seen["arguments"] = {
    "bind_input": arguments(binding_type.bind_input),
    "bind_output": arguments(binding_type.bind_output),
    "get_outputs": arguments(binding_type.get_outputs),
    "run_with_iobinding": arguments(session_type.run_with_iobinding),
    "preload_dlls": arguments(onnxruntime.preload_dlls),
}
values = onnxruntime.OrtValue
for name in ("data_ptr", "shape", "data_type", "numpy"):
    assert callable(getattr(values, name)), name
assert callable(onnxruntime.set_global_thread_pool_sizes)
assert callable(onnxruntime.SessionOptions.register_custom_ops_library)
seen["providers"] = onnxruntime.get_available_providers()
assert "OpenVINOExecutionProvider" in onnxruntime.get_all_providers()

# The runner of GPUs on a session of the CPU, whose tensors all are on the host.
model = version(root / "a")
options = OnnxOptions.of(model)
session = open_session(onnxruntime, model, options, [("CPUExecutionProvider", {})])
seen["places"] = [place.name for place in (*session.get_input_memory_infos(), *session.get_output_memory_infos())]
run_options = onnxruntime.RunOptions()
runner = OnnxDeviceRunner(session, ["OUT"], 0, run_options)
(output,) = runner.enqueue({"IN": np.ones((2, 3), np.float32)})
assert (output == -1).all() and runner.host_inputs == {"IN"}
texts = version(root / "texts", model=graph("Cast", to=TensorProto.STRING))
session_of_texts = open_session(onnxruntime, texts, options, [("CPUExecutionProvider", {})])
(output,) = OnnxDeviceRunner(session_of_texts, ["OUT"], 0, run_options).enqueue({"IN": np.full((1, 2), 3, np.float32)})
assert output.tolist() == [["3", "3"]]
for key, value in (("disable_synchronize_execution_providers", "1"), (SHRINKAGE, "cpu:0")):
    run_options.add_run_config_entry(key, value)
    assert run_options.get_run_config_entry(key) == value

# Addresses and values as they are bound on a GPU, on the host's memory.
array, wanted = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[0, -1, -2], [-3, -4, -5]])
binding = session.io_binding()
binding.bind_input("IN", "cpu", 0, 1, array.shape, array.ctypes.data)
binding.bind_output("OUT", "cpu", 0)
session.run_with_iobinding(binding, run_options)
(value,) = binding.get_outputs()
assert (value.numpy() == wanted).all() and value.data_type() == "tensor(float)" and value.shape() == [2, 3]
session.io_binding().bind_output("OUT", "cuda", 0)

# No GPU, no libraries of CUDA: ONNX Runtime makes a session on the CPU, and doesn't raise.
class Stream:
    device_id, handle = 0, 0x51

try:
    open_device_runner(onnxruntime, version(root / "b"), options, ["OUT"], Stream())
except WeirError as error:
    seen["refused"] = [error.code.name, error.message]
print("\\n" + json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = [WHEELS, Path(__file__).parents[5]]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path_factory.mktemp("models"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["file"].startswith(str(WHEELS))
    return found


def test_arguments_match_those_of_the_backend(seen: dict[str, Any]) -> None:
    arguments = seen["arguments"]
    assert arguments["bind_input"] == ["name", "device_type", "device_id", "element_type", "shape", "buffer_ptr"]
    assert arguments["bind_output"][:3] == ["name", "device_type", "device_id"]
    assert arguments["get_outputs"] == []
    assert arguments["run_with_iobinding"] == ["iobinding", "run_options"]
    assert "cuda" in arguments["preload_dlls"]


def test_the_wheel_is_found_and_has_a_cuda_provider(seen: dict[str, Any]) -> None:
    _, has_cuda, _ = seen["installation"]
    assert has_cuda
    assert "CUDAExecutionProvider" in seen["providers"]
    assert seen["places"] == ["Cpu", "Cpu"]


def test_a_session_without_its_gpu_fails_with_the_reason(seen: dict[str, Any]) -> None:
    if "refused" not in seen:
        pytest.skip("this machine has a GPU")
    code, message = seen["refused"]
    assert code == "UNAVAILABLE"
    assert message.startswith(
        "ONNX Runtime could not use CUDAExecutionProvider and would have run model 'net' on CPUExecutionProvider: lib"
    )
    assert message.endswith(": cannot open shared object file: No such file or directory")
    assert str(WHEELS) not in message


def test_every_option_of_the_cuda_provider_is_one_that_it_reads() -> None:
    provider = WHEELS / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    with provider.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert [name for name in sorted(CUDA_OPTIONS) if content.find(name.encode() + b"\0") < 0] == []
