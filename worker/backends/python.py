"""Python models: each instance is a child process of its own (`python_process`), owned by the instance's thread.

A model that dies takes nobody with it: its batch is done again, and it is started anew before the next one.
"""

from __future__ import annotations

import json
import logging
import platform
import threading
from collections.abc import Sequence
from pathlib import Path

from repository.config_text import config_from_dict, config_to_json
from schemas.errors import WeirError
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from telemetry.trace_context import exported_context
from worker.backend import (
    RESCHEDULED,
    Availability,
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    LoadedModel,
    ModelVersion,
    Result,
)
from worker.backends.python_messages import RESCHEDULED as AGAIN
from worker.backends.python_process import ProcessDied, PythonProcess, PythonRequest, PythonResponse, auto_complete
from worker.backends.python_responses import process_lost
from worker.devices import WorkerDevices

logger = logging.getLogger("weir.worker")

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


class PythonBackend:
    """See `worker.backend.Backend`.

    With `code` it is a Python-based backend of Triton's: that file is the code of all its models, whose folders hold
    whatever it reads. Source: Triton 2.51, observed.
    """

    def __init__(self, code: Path | None = None) -> None:
        self._code = code

    def availability(self, devices: WorkerDevices) -> Availability:
        """Wherever Python runs."""
        formats = ("model.py",) if self._code is None else ()
        return Availability(("KIND_CPU", "KIND_GPU", "KIND_MODEL"), formats, platform.python_version())

    def describe(self, model: ModelVersion) -> ModelConfig | None:
        """The configuration as the model's `auto_complete_config` completes it."""
        config = model.config if self._code is None else model.config.replace(runtime=self._code.name)
        completed = auto_complete(*_place(model, self._code), config_to_json(config))
        return config_from_dict(completed)

    def load(self, model: ModelVersion) -> LoadedModel:
        """Nothing is shared by instances."""
        return _PythonModel(model, self._code)


class _PythonModel:
    def __init__(self, model: ModelVersion, code: Path | None) -> None:
        self._model = model
        self._code = code

    def create_instance(self, device: InstanceDevice) -> Instance:
        model = self._model
        kind = device.kind.removeprefix("KIND_")
        args = {
            "model_config": json.dumps(config_to_json(model.config)),
            "model_instance_kind": "CPU" if kind == "AUTO" else kind,
            "model_instance_name": device.name,
            "model_instance_device_id": str(device.device_id),
            "model_repository": str(model.model_directory),
            "model_version": str(model.version),
            "model_name": model.name,
        }
        process = PythonProcess(*_place(model, self._code), args, model.calls)
        process.start(START_TIMEOUT_S)
        return _PythonInstance(process, device.name)

    def unload(self) -> None:
        pass  # each instance ends its own process


class _PythonInstance:
    def __init__(self, process: PythonProcess, name: str) -> None:
        self._process = process
        self._name = name

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        self._revive()
        python_requests = [
            PythonRequest(
                id=request.id,
                correlation_id=request.correlation_id,
                flags=request.sequence_flags,
                timeout_us=request.timeout_us,
                parameters=request.parameters or {},
                outputs=[output.name for output in request.outputs],
                inputs=request.inputs,
                trace=exported_context(request.traceparent, request.tracestate) if request.traceparent else "",
            )
            for request in requests
        ]
        execution.input_ready()
        sink = _Sink(execution)
        try:
            responses = self._process.execute(python_requests, sink)
        except ProcessDied as error:
            if execution.has_responded:
                # It can't be done again: somebody may have read what it said so far.
                logger.warning("%s: %s; its streams end", self._name, error)
                return [Result(error=process_lost())] * len(requests)
            raise InstanceDied(str(error)) from error
        execution.inferred()
        first = responses[0] if responses else None
        if first is not None and first.raised and first.error is not None:
            sink.close()
            raise first.error  # that of all its requests
        return [
            None if response is None else RESCHEDULED if response is AGAIN else _result(response)
            for response in responses
        ]

    def close(self) -> None:
        self._process.stop(STOP_TIMEOUT_S)

    def _revive(self) -> None:
        if self._process.is_running:
            return
        logger.warning("%s: its process has died and is started again", self._name)
        try:
            self._process.start(START_TIMEOUT_S)
        except WeirError as error:
            raise InstanceDied(f"its process could not be started again: {error.message}") from error


class _Sink:
    """The responses that a model sends itself, on their way to `execution`, which gets none once this is closed."""

    __slots__ = ("_execution", "_is_closed", "_lock", "is_cancelled")

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._is_closed = False
        self._lock = threading.Lock()
        self.is_cancelled = execution.is_cancelled

    def respond(self, position: int, response: PythonResponse | None, is_final: bool) -> None:
        with self._lock:
            if not self._is_closed:
                self._execution.respond(position, None if response is None else _result(response), is_final)

    def fail(self, error: WeirError) -> None:
        with self._lock:
            if not self._is_closed:
                self._execution.fail(error)

    def close(self) -> None:
        """The run has failed: what a thread of the model still sends must not get between the answers of another run."""
        with self._lock:
            self._is_closed = True


def _place(model: ModelVersion, code: Path | None) -> tuple[Path, int | None, str]:
    """Where the code is: a folder, the version's folder in it (None: itself), and the name of the file in that."""
    if code is not None:
        return code.parent, None, code.name
    return model.model_directory, model.version, model.config.default_model_filename or "model.py"


def _result(response: PythonResponse) -> Result:
    return Result(
        response.outputs,
        response.parameters,
        response.error,
        is_model_response=response.error is not None and not response.raised,
    )
