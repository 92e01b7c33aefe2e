"""Python models made up by tests, and the processes that run them."""

from __future__ import annotations

import json
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from schemas.errors import WeirError
from schemas.tensors import Tensor
from worker.backend import ProcessCalls
from worker.backends.python_process import PythonProcess, PythonResponse

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(t.name(), t.as_numpy()) for t in request.inputs()])
            for request in requests
        ]
"""

EXECUTE = """
import json, os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
{body}
"""
"""A model of which only the body of `execute` is given."""


class Models:
    """Writes models into a repository of their own and runs them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, source: str, version: int = 1, **files: str) -> Path:
        """The folder of a new model with `source` as its model.py; `files` are further ones by path with / as __."""
        folder = self.root / f"model-{uuid.uuid4().hex[:8]}"
        (folder / str(version)).mkdir(parents=True)
        (folder / str(version) / "model.py").write_text(textwrap.dedent(source))
        for name, content in files.items():
            path = folder / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return folder

    @contextmanager
    def running(
        self, source: str, config: dict | None = None, calls: ProcessCalls | None = None, **files: str
    ) -> Iterator[PythonProcess]:
        folder = self.write(source, **files)
        args = {
            "model_config": json.dumps(config or {}),
            "model_instance_kind": "CPU",
            "model_instance_name": "m_0_0",
            "model_instance_device_id": "0",
            "model_repository": str(folder),
            "model_version": "1",
            "model_name": "m",
        }
        process = PythonProcess(folder, 1, "model.py", args, calls)
        try:
            process.start(30)
            yield process
        finally:
            process.stop(5)


def execute_body(body: str) -> str:
    return EXECUTE.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))


def numbers(*shape: int, name: str = "A") -> Tensor:
    return Tensor.from_numpy(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape), "FP32")


def only(responses: list[PythonResponse]) -> PythonResponse:
    (response,) = responses
    assert response.error is None
    return response


def error_of(responses: list[PythonResponse]) -> WeirError:
    (response,) = responses
    assert response.error is not None
    return response.error
