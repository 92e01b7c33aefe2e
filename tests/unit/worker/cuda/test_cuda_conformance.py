"""The CUDA functions that `worker/cuda` uses, compared with NVIDIA's package and with the fake one.

The package works without a driver as far as this goes: every call answers that there is none, if it takes its arguments.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weir.worker.cuda.runtime import STICKY

ROOT = Path(__file__).parents[4]
WHEELS = Path(sys.prefix) / "gpu-wheels"
FAKE = ROOT / "tests/support/fakes/site/cuda/bindings/runtime.py"

NOT_CUDA_S = {"DEVICE", "reset", "launch", "array_at"}

_PROBE = """
import ctypes, json, sys
from cuda.bindings import driver, runtime
from cuda.bindings.utils import get_cuda_native_handle

kinds, modes = runtime.cudaMemcpyKind, runtime.cudaStreamCaptureMode
calls = {
    "cudaSetDevice": (0,),
    "cudaStreamCreateWithFlags": (runtime.cudaStreamNonBlocking,),
    "cudaStreamDestroy": (4096,),
    "cudaStreamSynchronize": (4096,),
    "cudaStreamQuery": (4096,),
    "cudaStreamWaitEvent": (4096, 8192, 0),
    "cudaEventCreateWithFlags": (runtime.cudaEventBlockingSync,),
    "cudaEventDestroy": (8192,),
    "cudaEventRecord": (8192, 4096),
    "cudaEventSynchronize": (8192,),
    "cudaEventElapsedTime": (8192, 8192),
    "cudaDeviceGetDefaultMemPool": (0,),
    "cudaMemPoolSetAttribute": (
        0, runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold, driver.cuuint64_t(2**64 - 1)
    ),
    "cudaMemPoolTrimTo": (0, 0),
    "cudaMemGetInfo": (),
    "cudaMallocAsync": (256, 4096),
    "cudaFreeAsync": (1 << 40, 4096),
    "cudaMemsetAsync": (1 << 40, 0, 256, 4096),
    "cudaIpcOpenMemHandle": (runtime.cudaIpcMemHandle_t(), 1),
    "cudaIpcCloseMemHandle": (1 << 40,),
    "cudaHostAlloc": (256, runtime.cudaHostAllocPortable),
    "cudaFreeHost": (1 << 40,),
    "cudaMemcpyAsync": (1 << 40, 1 << 41, 256, kinds.cudaMemcpyHostToDevice, 4096),
    "cudaStreamBeginCapture": (4096, modes.cudaStreamCaptureModeRelaxed),
    "cudaStreamEndCapture": (4096,),
    "cudaGraphInstantiate": (0, 0),
    "cudaGraphLaunch": (0, 4096),
    "cudaGraphDestroy": (0,),
    "cudaGraphExecDestroy": (0,),
}
answers = {}
for name, arguments in calls.items():
    outcome = getattr(runtime, name)(*arguments)
    assert isinstance(outcome, tuple) and isinstance(outcome[0], runtime.cudaError_t), name
    answers[name] = len(outcome)
runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
assert runtime.cudaIpcMemHandle_t().getPtr()
assert "(dptr)" in driver.cuMemGetAddressRange.__doc__.splitlines()[0] and runtime.cudaIpcMemLazyEnablePeerAccess == 1
try:
    from cuda.core._utils.runtime_cuda_error_explanations_frozen import _FALLBACK_EXPLANATIONS as explained
except ImportError:
    from cuda.core._utils import runtime_cuda_error_explanations_frozen as frozen
    explained = next(value for value in vars(frozen).values() if isinstance(value, dict) and 700 in value)
ends = [runtime.cudaError_t(number).name for number, text in explained.items() if "terminated and relaunched" in text]
print(json.dumps({
    "answers": answers,
    "ends": ends,
    "errors": {error.name: int(error) for error in runtime.cudaError_t},
    "handles": [
        get_cuda_native_handle(kind(12)) for kind in (runtime.cudaStream_t, runtime.cudaEvent_t, runtime.cudaGraph_t)
    ],
    "integers": [runtime.cudaStreamNonBlocking, runtime.cudaEventDefault, runtime.cudaEventBlockingSync,
                 runtime.cudaHostAllocPortable],
    "has": [name for name in sys.argv[1].split() if hasattr(runtime, name)],
    "success_is_true": bool(runtime.cudaError_t.cudaSuccess),
}))
"""


def used_names() -> set[str]:
    """The names of the runtime that `worker/cuda` uses."""
    found: set[str] = set()
    for path in (ROOT / "worker/cuda").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("cuda") and node.attr != "cuda":
                found.add(node.attr)
    return {name for name in found if name not in {"cuda_runtime"}}


def fake_names() -> set[str]:
    tree = ast.parse(FAKE.read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in named if not name.startswith("_")} - NOT_CUDA_S


def test_nvidia_s_package_has_what_is_used() -> None:
    if not (WHEELS / "cuda/bindings").is_dir():
        print(f"left out: {WHEELS} is not there, which `make test` makes")
        pytest.skip("NVIDIA's packages are not at hand")
    used = used_names()
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, " ".join(used)],
        env={**os.environ, "PYTHONPATH": str(WHEELS), "CUDA_CORE_DONT_FIX_TAB_COMPLETION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert probe.returncode == 0, probe.stderr
    told = json.loads(probe.stdout)
    calls = {name for name in used if name in told["answers"]}
    inside = {"cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "cudaMemcpyDeviceToDevice"}
    inside |= {"cudaMemPoolAttrReleaseThreshold"}
    inside |= {"cudaStreamCaptureModeRelaxed"} | set(told["errors"])
    assert used - set(told["has"]) - inside == set()
    assert {name for name in used if name in told["has"]} - calls <= {
        "cudaIpcMemHandle_t",
        "cudaMemcpyKind",
        "cudaMemPoolAttr",
        "cudaStreamCaptureMode",
        "cudaError_t",
        "cudaStreamNonBlocking",
        "cudaEventDefault",
        "cudaEventBlockingSync",
        "cudaHostAllocPortable",
    }, "every function is called by the probe"
    two = {"cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaEventElapsedTime", "cudaMallocAsync"}
    two |= {"cudaDeviceGetDefaultMemPool", "cudaHostAlloc", "cudaStreamEndCapture", "cudaGraphInstantiate"}
    two |= {"cudaIpcOpenMemHandle"}
    assert told["answers"] == {
        name: 3 if name == "cudaMemGetInfo" else 2 if name in two else 1 for name in told["answers"]
    }
    assert told["integers"] == [1, 0, 1, 1]
    assert told["handles"] == [12, 12, 12]
    assert told["success_is_true"] is False
    # All after which CUDA's documentation says that the process must go are known, and all have their numbers.
    assert set(told["ends"]) <= STICKY.keys()
    assert STICKY.items() <= told["errors"].items()


def test_the_made_up_package_is_like_it() -> None:
    """The fake must be like NVIDIA's package for the tests of `worker/cuda` to be valid."""
    used = {name for name in used_names() if not name.startswith(("cudaError", "cudaMemcpyH", "cudaMemcpyD"))}
    used -= {"cudaMemPoolAttrReleaseThreshold", "cudaStreamCaptureModeRelaxed"}
    constants = {"cudaStreamNonBlocking", "cudaEventDefault", "cudaEventBlockingSync", "cudaHostAllocPortable"}
    assert used - constants <= fake_names()
    if not (WHEELS / "cuda/bindings").is_dir():
        print(f"left out: {WHEELS} is not there, which `make test` makes")
        pytest.skip("NVIDIA's packages are not at hand")
    functions = {node.name: node for node in ast.parse(FAKE.read_text()).body if isinstance(node, ast.FunctionDef)}
    names = sorted(fake_names() & set(functions))
    probe = "import json\nfrom cuda.bindings import runtime\n"
    probe += f"print(json.dumps({{n: getattr(runtime, n).__doc__.splitlines()[0] for n in {names}}}))"
    run = subprocess.run(
        [sys.executable, "-P", "-c", probe],
        env={**os.environ, "PYTHONPATH": str(WHEELS)},
        capture_output=True,
        text=True,
        check=True,
    )
    signatures = {name: text[text.index("(") + 1 : text.rindex(")")] for name, text in json.loads(run.stdout).items()}
    for name, signature in signatures.items():
        wanted = len([part for part in signature.split(",") if part.strip()])
        assert len(functions[name].args.args) - 1 == wanted, f"{name}({signature})"


def test_nothing_of_cuda_is_imported_before_it_is_needed() -> None:
    probe = "import sys, weir.worker.main, weir.worker.cuda.device_instance\n"
    probe += "print([name for name in sys.modules if name.partition('.')[0] == 'cuda'])"
    run = subprocess.run(
        [sys.executable, "-P", "-c", probe],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{WHEELS}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"
