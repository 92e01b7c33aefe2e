"""Where an instance of a Python model is told that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from python_models import Models

from repository.config_text import config_from_dict
from schemas.requests import InferRequest
from worker.backend import Execution, InstanceDevice, ModelVersion
from worker.backends.python import PythonBackend

TELL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        told = np.array([json.dumps(self.args)], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("T", told)]) for _ in requests]
"""


@pytest.mark.parametrize(
    ("kind", "device_id", "told"),
    [("KIND_CPU", 0, "CPU"), ("KIND_GPU", 3, "GPU"), ("KIND_MODEL", 0, "MODEL"), ("KIND_AUTO", 0, "CPU")],
)
def test_kind_and_device(tmp_path: Path, kind: str, device_id: int, told: str) -> None:
    """On a GPU inputs come in host memory all the same; what the model does with the device is its own."""
    config = config_from_dict({"name": "m", "backend": "python"})
    loaded = PythonBackend().load(ModelVersion("m", 1, Models(tmp_path).write(TELL), config))
    instance = loaded.create_instance(InstanceDevice(kind, device_id, "m_0"))
    try:
        (result,) = instance.execute([InferRequest("m", "1", "", [], [], None)], Execution(cast(Any, None)))
    finally:
        instance.close()
        loaded.unload()
    assert result is not None
    args = json.loads(bytes(result.outputs[0].data)[4:])
    assert (args["model_instance_kind"], args["model_instance_device_id"]) == (told, str(device_id))
    assert (args["model_name"], args["model_version"], args["model_instance_name"]) == ("m", "1", "m_0")
