"""The Python model that runs one instance of another backend in a process (`weir.worker.backends.isolation.backend`).

No file of a user lies beside it. Only here Weir's own packages are on the path of a model's process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from _weir_errors import BackendError
from _weir_logger import log_exception

_HERE = Path(__file__).absolute().parent  # not resolved: in a checkout `weir/worker` is a link
# Weir comes before a module of the same name, and the modules of this folder are not on the path.
sys.path[:] = [str(_HERE.parents[3]), *(entry for entry in sys.path if Path(entry or ".").resolve() != _HERE.resolve())]

from weir.bus.payloads.arena import PayloadReader
from weir.repository.completion import DescribedModel
from weir.repository.config_text import config_from_dict, config_to_json
from weir.schemas.config.model_config import (
    InstanceGroup,
    ModelConfig,
)
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import (
    RESCHEDULED,
    Execution,
    ExecutionHandle,
    InstanceDevice,
    InstanceDied,
    ModelVersion,
    Result,
)
from weir.worker.backends.isolation.messages import (
    DESCRIPTION_PARAMETER,
    MODEL_PARAMETER,
    STATE_PREFIX,
    import_backend,
)
from weir.worker.cuda.pinned import PINNED

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Hosts the inner backend's instance behind the interface of Triton's Python backend."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Returns the description of the model in a parameter of the configuration."""
        fields = config.as_dict()
        with _coded_errors():
            description = _describe(json.loads(fields["parameters"][MODEL_PARAMETER]["string_value"]))
        fields["parameters"][DESCRIPTION_PARAMETER] = {"string_value": json.dumps(description)}
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model in the inner backend, and creates the instance."""
        outer = json.loads(args["model_config"])
        source = json.loads(outer["parameters"][MODEL_PARAMETER]["string_value"])
        kind, device_id, name, profiles = source["device"]
        device = InstanceDevice(kind, device_id, name, profiles=tuple(profiles))
        PINNED.total_bytes = source["pinned_bytes"]
        self._reader = PayloadReader()
        self._name = source["name"]
        self._is_decoupled = bool(pb_utils.using_decoupled_model_transaction_policy(outer))
        with _coded_errors():
            self._loaded = import_backend(source["backend"]).load(_model(source, device))
            self._instance = self._loaded.create_instance(device)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Runs the batch as an instance in the worker does."""
        received = [self._convert(request) for request in requests]
        execution = _Execution(self._reader, requests)
        try:
            with _coded_errors():
                outcomes: Any = self._instance.execute(received, execution)
                if isinstance(outcomes, ExecutionHandle):  # a device runs it
                    outcomes = outcomes.results()
        except InstanceDied as death:
            # Nothing can run here any more. The worker starts another process, which runs the batch again.
            log_exception("the instance has died", death)
            os.kill(os.getpid(), signal.SIGKILL)
            raise
        except Exception as error:
            if isinstance(error, BackendError):
                raise
            log_exception("the model raised an exception", error)
            raise BackendError(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL) from error
        if self._is_decoupled:
            for position, outcome in enumerate(outcomes):
                if outcome is RESCHEDULED:
                    requests[position].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                elif outcome is not None:
                    execution.respond(position, outcome, True)
            return None
        return [_response(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]

    def finalize(self) -> None:
        """Closes the instance and unloads the model."""
        self._instance.close()
        self._loaded.unload()

    def _convert(self, request: Any) -> InferRequest:
        inputs = [
            Tensor(tensor.name(), tensor.datatype(), tensor.shape(), memoryview(tensor.content(0)))
            for tensor in request.inputs()
        ]
        received = InferRequest(self._name, id=request.request_id(), inputs=inputs)
        received.outputs = [
            RequestedOutput(name) for name in request.requested_output_names() if not name.startswith(STATE_PREFIX)
        ]
        received.correlation_id = request.correlation_id()
        received.sequence_flags = request.flags()
        received.timeout_us = request.timeout()
        received.parameters = json.loads(request.parameters())
        return received


@contextmanager
def _coded_errors() -> Iterator[None]:
    """Raises an error of the backend so that the worker raises the same."""
    try:
        yield
    except WeirError as error:
        raise BackendError(error.message, error.code.number) from error


class _Execution(Execution):
    """Sends the responses that the inner backend sends itself, by the response senders of the requests."""

    __slots__ = ("_has_responded", "requests")

    def __init__(self, reader: PayloadReader, requests: list[Any]) -> None:
        super().__init__(reader)
        self.requests = requests
        self._has_responded = False

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        self._has_responded = True
        sender = self.requests[position].get_response_sender()
        if not sender.has_ended():
            sender.send(None if result is None else _response(None, result), _FINAL if is_final else 0)

    def fail(self, error: WeirError) -> None:
        for position in range(len(self.requests)):
            self.respond(position, Result(error=error), True)

    def is_cancelled(self, position: int) -> bool:
        return bool(self.requests[position].is_cancelled())

    @property
    def has_responded(self) -> bool:
        return self._has_responded


def _response(request: Any, outcome: Result | None) -> Any:
    if outcome is None:
        return None
    if outcome is RESCHEDULED:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None
    if outcome.error is not None:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(outcome.error.message, outcome.error.code.number))
    outputs = [_sent(tensor, tensor.name) for tensor in outcome.outputs]
    outputs += [_sent(tensor, STATE_PREFIX + tensor.name) for tensor in outcome.states]
    return pb_utils.InferenceResponse(outputs, parameters=outcome.parameters)


def _sent(tensor: Tensor, name: str) -> Any:
    data = tensor.data
    if isinstance(data, tuple):
        raise internal(f"the content of output '{name}' has not been fetched")
    content = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) and len(data) else bytes(data)
    return pb_utils.Tensor.received(name, tensor.datatype, tensor.shape, content)


def _describe(source: dict[str, Any]) -> dict[str, Any] | None:
    described = import_backend(source["backend"]).describe(_model(source, None))
    if isinstance(described, DescribedModel):
        rows = described.inputs, described.outputs, described.defaulted
        tensors = [[list(tensor) for tensor in tensors] for tensors in rows]
        return {"tensors": tensors, "sizes": [described.largest_batch, described.tried_size]}
    return {"config": config_to_json(described)} if isinstance(described, ModelConfig) else None


def _model(source: dict[str, Any], device: InstanceDevice | None) -> ModelVersion:
    config = config_from_dict(source["config"])
    if device is not None:
        # This process has one instance, whatever the configured count is.
        gpus = [device.device_id] if device.kind == "KIND_GPU" else []
        group: dict[str, Any] = {"name": device.name, "kind": device.kind, "count": 1, "gpus": gpus}
        config = config.replace(instance_group=[InstanceGroup(**group)])
    folder = Path(source["model_directory"])
    return ModelVersion(source["name"], source["version"], folder, config, settings=source["settings"])
