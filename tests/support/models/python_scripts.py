"""Python models written by tests, processes that run them, and executions that collect their responses."""

from __future__ import annotations

import json
import textwrap
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import Execution, ProcessCalls, Result
from weir.worker.backends.python.process import ProcessSpec, PythonProcess

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
"""A model; only the body of its `execute` is missing."""


class ModelProcess(PythonProcess):
    """A process whose failed batches give results with the error, and whose sent responses may be ignored."""

    def execute(self, requests: Sequence[InferRequest], execution: Execution | None = None) -> list[Result | None]:
        try:
            return super().execute(requests, execution or Collected())
        except WeirError as error:
            return [Result(error=error) for _ in requests]


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

    def process(
        self, source: str, config: dict | None = None, calls: ProcessCalls | None = None, **files: str
    ) -> ModelProcess:
        """A process that has not loaded its model yet."""
        folder = self.write(source, **files)
        arguments = {
            "model_config": json.dumps(config or {}),
            "model_instance_kind": "CPU",
            "model_instance_name": "m_0_0",
            "model_instance_device_id": "0",
            "model_repository": str(folder),
            "model_version": "1",
            "model_name": "m",
        }
        metrics = None if calls is None else calls.metrics.of_load("m", 1)
        return ModelProcess(ProcessSpec(folder, 1, arguments=arguments, calls=calls, metrics=metrics))

    @contextmanager
    def running(
        self, source: str, config: dict | None = None, calls: ProcessCalls | None = None, **files: str
    ) -> Iterator[ModelProcess]:
        process = self.process(source, config, calls, **files)
        try:
            process.load(30)
            yield process
        finally:
            process.stop(5)


def execute_body(body: str) -> str:
    return EXECUTE.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))


def numbers(*shape: int, name: str = "A") -> Tensor:
    return Tensor.from_numpy(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape), "FP32")


def python_request(id: str = "", *, inputs: Sequence[Tensor] = (), outputs: Sequence[str] = ()) -> InferRequest:
    return InferRequest("m", "1", id, list(inputs), [RequestedOutput(name) for name in outputs])


def only(results: Sequence[Result | None]) -> Result:
    (result,) = results
    assert result is not None
    assert result.error is None
    return result


def error_of(results: Sequence[Result | None]) -> WeirError:
    (result,) = results
    assert result is not None
    assert result.error is not None
    return result.error


DECOUPLED = {"model_transaction_policy": {"decoupled": True}}

TRIED = """
        def tried(call, *arguments, **options):
            try:
                call(*arguments, **options)
                return "ok"
            except (pb_utils.TritonModelException, TypeError) as error:
                return f"{type(error).__name__}: {error}".partition("\\n")[0]

        def texts(*lines):
            return pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array(lines, dtype=np.object_))])

        FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
"""


class Collected(Execution):
    """Keeps a copy of each response that a model sends."""

    def __init__(self) -> None:
        super().__init__(PayloadReader())
        self.responses: dict[int, list[Result | None]] = {}
        self.over: list[int] = []
        self.failures: list[WeirError] = []
        self.cancelled: set[int] = set()

    def respond(self, position: int, response: Result | None, is_final: bool) -> None:
        assert position not in self.over
        for tensor in () if response is None else response.outputs:
            assert not isinstance(tensor.data, tuple)
            tensor.data = bytes(tensor.data)
        self.responses.setdefault(position, []).append(response)
        if is_final:
            self.over.append(position)

    def is_cancelled(self, position: int) -> bool:
        return position in self.cancelled

    def fail(self, error: WeirError) -> None:
        self.failures.append(error)

    def texts(self, position: int = 0) -> list[str]:
        """The first string of each response, "-" for a final mark without a response."""
        return [
            "-" if response is None else response.outputs[0].to_numpy()[0].decode()
            for response in self.responses.get(position, [])
        ]


def code_and_message(error: WeirError | None) -> tuple[ErrorCode, str]:
    assert error is not None
    return error.code, error.message


def body(text: str) -> str:
    """A model with `tried`, `texts` and `FINAL` in scope of its `execute`."""
    source = execute_body(text)
    head, _, rest = source.partition("    def execute(self, requests):\n")
    return f"{head}    def execute(self, requests):\n{TRIED}{rest}"


def run(process: ModelProcess, *ids: str) -> tuple[list[Result | None], Collected]:
    """What `execute` returned for requests with these ids, and what the model sent."""
    sent = Collected()
    return process.execute([python_request(id) for id in ids or ("",)], sent), sent
