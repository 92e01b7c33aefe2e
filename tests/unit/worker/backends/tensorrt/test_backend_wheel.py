"""The names of TensorRT that Weir uses exist in the real bindings, which import without a driver."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

WHEELS = Path(sys.prefix) / "gpu-wheels"
BACKEND = Path(__file__).parents[5] / "worker" / "backends" / "tensorrt"
CLASSES = {
    "_engine": "ICudaEngine",
    "engine": "ICudaEngine",
    "_context": "IExecutionContext",
    "_runtime": "Runtime",
}
PROBE = """
import json, sys
import tensorrt_lean_bindings as trt
wanted = json.loads(sys.stdin.read())
def there(path):
    value = trt
    for name in path:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True
print(json.dumps([path for path in wanted if not there(path)]))
"""


def used_names() -> list[list[str]]:
    """Paths below the module `tensorrt` that the backend's source reads."""
    paths: set[tuple[str, ...]] = set()
    for top in (node for file in ("engine.py", "backend.py") for node in ast.parse((BACKEND / file).read_text()).body):
        is_engine = isinstance(top, ast.ClassDef) and top.name == "TensorRtEngine"
        for node in ast.walk(top):
            names: list[str] = []
            while isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
            if not isinstance(node, ast.Name) or not names:
                continue
            names.insert(0, node.id)
            if "trt" in names[:3] and names[-1] != "trt":
                paths.add(tuple(names[names.index("trt") + 1 :]))
            elif names[0] == "self" and len(names) > 2 and names[1] in CLASSES and is_engine:
                paths.add((CLASSES[names[1]], names[2]))
            elif names[:2] == ["self", "_context"] and len(names) > 2:
                paths.add(("IExecutionContext", names[2]))
            elif names[0] == "engine" and is_engine and len(names) == 2:
                paths.add(("ICudaEngine", names[1]))
    return sorted(map(list, paths))


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS.exists(), reason="the GPU wheels are not unpacked: run `make test`")
def test_every_name_is_in_the_real_bindings() -> None:
    wanted = used_names()
    found = {tuple(path) for path in wanted}
    # A test of the test: what it must have come upon.
    assert {("IExecutionContext", "execute_async_v3"), ("ICudaEngine", "get_tensor_profile_shape")} <= found
    assert ("TensorIOMode", "INPUT") in found
    assert len(wanted) > 20
    probe = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(WHEELS)},
    )
    assert json.loads(probe.stdout) == []


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS.exists(), reason="the GPU wheels are not unpacked: run `make test`")
def test_the_fake_has_no_name_that_the_real_bindings_lack() -> None:
    from tests.support.fakes import tensorrt_module as fake_tensorrt

    pairs = [(fake_tensorrt.Engine, "ICudaEngine"), (fake_tensorrt.Context, "IExecutionContext")]
    wanted = [[real, name] for fake, real in pairs for name in vars(fake) if not name.startswith("_")]
    wanted += [[enum.__name__, member.name] for enum in ENUMS for member in enum]
    probe = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(WHEELS)},
    )
    assert json.loads(probe.stdout) == []


def _enums() -> list:
    from tests.support.fakes import tensorrt_module as fake

    return [fake.DataType, fake.TensorIOMode, fake.TensorLocation, fake.ExecutionContextAllocationStrategy]


ENUMS = _enums()
