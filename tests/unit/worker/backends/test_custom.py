"""Custom backends: how their file is imported, and the errors of one that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from weir import backend as public
from weir.bus.payloads.arena import PayloadReader
from weir.schemas.config.model_config import ModelConfig, ModelInput, ModelOutput
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import Execution, InstanceDevice, ModelVersion
from weir.worker.backends.custom import BackendFiles, CustomBackend
from weir.worker.devices.gpus import WorkerDevices

CPU = InstanceDevice("KIND_CPU", 0, "m_0")

CONFIG = ModelConfig(
    name="m",
    backend="mine",
    max_batch_size=8,
    input=[ModelInput(name="X", data_type="TYPE_FP32", dims=[1])],
    output=[ModelOutput(name="Y", data_type="TYPE_FP32", dims=[1])],
)

ON_ARRAYS = """
from __future__ import annotations
from dataclasses import dataclass
import numpy as np
from weir.backend import ArrayBackend, DescribedModel, DescribedTensor

@dataclass
class Factor:
    value: float

class Backend(ArrayBackend):
    formats = ("factor.txt",)
    def open(self, model):
        factor = Factor(2)
        return lambda inputs: {RETURNED}
    def describe(self, model):
        return DescribedModel([DescribedTensor("X", "TYPE_FP32", [-1, 1])], [DescribedTensor("Y", "TYPE_FP32", [-1, 1])])
"""

WHOLE = """
from weir.backend import ArrayInstance, Availability, NamedDatatype

class Backend:
    def availability(self, devices):
        return Availability(["KIND_CPU"], ["weights"], "1.5")
    def load(self, model):
        return Loaded(model)

class Loaded:
    def __init__(self, model):
        self.config = model.config
    def create_instance(self, device):
        return ArrayInstance(Runner(), self.config, [NamedDatatype("Y", "FP32")])
    def unload(self):
        raise OSError("not given up")

class Runner:
    calls = 0
    def run(self, inputs):
        self.calls += 1
        return [inputs["X"] + self.calls]
    def close(self):
        pass
"""


def backend_in(folder: Path, text: str, files: BackendFiles | None = None) -> CustomBackend:
    file = folder / "backend.py"
    file.write_text(text)
    return CustomBackend("mine", file, files or BackendFiles())


def version(folder: Path) -> ModelVersion:
    return ModelVersion("m", 1, folder, CONFIG)


def answers(backend: CustomBackend, folder: Path, *batches: list[float]) -> list[list[float]]:
    """The output of an instance for each request of one batch."""
    instance = backend.load(version(folder)).create_instance(CPU)
    requests = [
        InferRequest("m", inputs=[Tensor.from_numpy("X", np.array(rows, np.float32).reshape(-1, 1), "FP32")])
        for rows in batches
    ]
    try:
        results = instance.execute(requests, Execution(PayloadReader()))
        return [[float(value) for value in result.outputs[0].to_numpy()[:, 0]] for result in results if result]
    finally:
        instance.close()


def test_a_function_of_arrays_is_a_backend(tmp_path: Path) -> None:
    backend = backend_in(tmp_path, ON_ARRAYS.replace("RETURNED", '"Y": inputs["X"] * np.float32(factor.value)'))
    assert answers(backend, tmp_path, [1, 2], [3]) == [[2, 4], [6]]
    described = backend.describe(version(tmp_path))
    assert described is not None
    assert backend.availability(WorkerDevices()).formats == ("factor.txt",)


def test_a_backend_with_all_methods(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_in(tmp_path, WHOLE)
    assert backend.availability(WorkerDevices()).version == "1.5"
    assert backend.describe(version(tmp_path)) is None
    assert answers(backend, tmp_path, [1]) == [[2]]
    backend.load(version(tmp_path)).unload()
    assert "unloading a model failed" in caplog.text


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ('"Y": inputs["X"] * 2.0 ** np.arange(1)', "output 'Y' is of type FP64, but the configuration specifies FP32"),
        ('"Z": inputs["X"]', "output 'Y' is missing"),
        ('"Y": 1.0', "output 'Y' must be an array, found type 'float'"),
        ('"Y"', "expected a dictionary of outputs, found type 'set'"),
        ('"Y": inputs["X"][:1]', "output 'Y' has 1 rows for a batch of 2"),
    ],
)
def test_outputs_are_checked(tmp_path: Path, returned: str, reason: str) -> None:
    backend = backend_in(tmp_path, ON_ARRAYS.replace("RETURNED", returned))
    with pytest.raises(WeirError, match=reason):
        answers(backend, tmp_path, [1, 2])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "",
            "backend 'mine': backend.py has no class 'Backend' with a method 'load'; a TritonPythonModel belongs in",
        ),
        ("Backend = 3", "backend 'mine': backend.py has no class 'Backend' with a method 'load'"),
        ("class Backend: pass", "backend 'mine': backend.py has no class 'Backend' with a method 'load'"),
        (
            "import nowhere",
            "backend 'mine': ModuleNotFoundError: No module named 'nowhere'\n\nAt:\n  backend.py(1): <module>",
        ),
        ("raise SystemExit(3)", "backend 'mine': SystemExit: 3"),
        (
            "class Backend:\n  def __init__(self): 1 / 0\n  def load(self, model): ...",
            "ZeroDivisionError: division by zero",
        ),
        (
            "class Backend:\n  def load(self, model): pass",
            "the object that 'load' returned has no method 'create_instance'",
        ),
        ("class Backend(", "SyntaxError: '(' was never closed"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, reason: str) -> None:
    modules = set(sys.modules)
    with pytest.raises(WeirError) as failed:
        backend_in(tmp_path, text).load(version(tmp_path))
    assert reason in failed.value.message
    assert str(tmp_path) not in failed.value.message
    assert len({name for name in sys.modules.keys() - modules if name.startswith("weir_custom")}) <= 1


def test_errors_of_create_instance_name_file_and_line(tmp_path: Path) -> None:
    backend = backend_in(tmp_path, WHOLE.replace("return ArrayInstance", "return device.memory"))
    with pytest.raises(WeirError, match=r"backend 'mine': AttributeError: (.|\n)*backend.py\(14\): create_instance"):
        backend.load(version(tmp_path)).create_instance(CPU)


def test_a_file_is_imported_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    files = BackendFiles()
    backend_in(tmp_path, ON_ARRAYS.replace("RETURNED", ""), files)
    file = tmp_path / "backend.py"
    first = files.backend_class("mine", file)
    assert files.backend_class("other", file) is first
    os.utime(file, ns=(1, 1))
    second = files.backend_class("mine", file)
    assert second is not first
    assert first.__module__ not in sys.modules
    assert second.__module__ in sys.modules
    file.rename(tmp_path / "moved.py")
    third = files.backend_class("mine", tmp_path / "moved.py")
    assert second.__module__ not in sys.modules, "a removed file is forgotten"
    assert third.__module__ in sys.modules
    assert not list(tmp_path.glob("__pycache__"))
    assert str(tmp_path) not in sys.path


def test_every_public_name_exists() -> None:
    assert len(set(public.__all__)) == len(public.__all__)
    assert [name for name in public.__all__ if not hasattr(public, name)] == []
