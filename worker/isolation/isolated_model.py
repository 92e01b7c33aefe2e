"""The Python model that runs one instance of another backend in its process; see `worker.isolation.backend`.

It is found beside nothing of a user's, so here alone the house comes onto the path of a model's process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from _weir_logger import log_exception

_HERE = Path(__file__).resolve().parent
# This folder's names are no modules of the process, and the house's are, whatever else is called as they are.
sys.path[:] = [str(_HERE.parents[1]), *(entry for entry in sys.path if Path(entry or ".").resolve() != _HERE)]

from bus.payloads import PayloadReader  # noqa: E402  # found only from here on
from repository.completion import DescribedModel  # noqa: E402
from repository.config_text import config_from_dict, config_to_json  # noqa: E402
from schemas.errors import WeirError, internal  # noqa: E402
from schemas.execution_config import InstanceGroup  # noqa: E402
from schemas.model_config import ModelConfig  # noqa: E402
from schemas.requests import InferRequest, RequestedOutput  # noqa: E402
from schemas.tensors import Tensor  # noqa: E402
from worker.backend import (  # noqa: E402
    RESCHEDULED,
    Execution,
    InstanceDevice,
    InstanceDied,
    ModelVersion,
    Result,
)
from worker.isolation.inner_backend import backend_from  # noqa: E402
from worker.isolation.messages import DESCRIBED, INNER, RAISED, STATE, told_error  # noqa: E402
from worker.own_instance import OwnInstance  # noqa: E402

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """See the module."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Answers in a parameter what the model says of itself, or why it doesn't."""
        fields = config.as_dict()
        try:
            told = _described(json.loads(fields["parameters"][INNER]["string_value"]))
        except WeirError as error:
            raise pb_utils.TritonModelException(told_error(error)) from error
        fields["parameters"][DESCRIBED] = {"string_value": json.dumps(told)}
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Has the backend load the model, and makes the instance."""
        outer = json.loads(args["model_config"])
        told = json.loads(outer["parameters"][INNER]["string_value"])
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told["device"].items()
        }
        device = InstanceDevice(**fields)
        self._reader = PayloadReader()
        self._name = told["name"]
        self._is_decoupled = bool(pb_utils.using_decoupled_model_transaction_policy(outer))
        try:
            self._loaded = backend_from(told["backend"]).load(_model(told, device))
            instance = self._loaded.create_instance(device)
        except WeirError as error:
            raise pb_utils.TritonModelException(told_error(error)) from error
        is_own = "file" in told["backend"]
        self._instance = OwnInstance(told["config"].get("backend", ""), instance) if is_own else instance

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Runs the batch as the worker would have."""
        received = [self._received(request) for request in requests]
        execution = _Execution(self._reader, requests)
        try:
            outcomes: Any = self._instance.execute(received, execution)
            wait = getattr(outcomes, "results", None)
            if wait is not None:  # a device runs it
                outcomes = wait()
        except InstanceDied as death:
            # Nothing can be run here any more: the batch is done again by the process that comes after this one.
            log_exception("the instance has died", death)
            os.kill(os.getpid(), signal.SIGKILL)
            raise
        except WeirError as error:
            return self._failed(execution, error)
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its batch, and nothing else
            log_exception("the model raised an exception", error)
            return self._failed(execution, internal(f"{type(error).__name__}: {error}"))
        if self._is_decoupled:
            for position, outcome in enumerate(outcomes):
                if outcome is RESCHEDULED:
                    requests[position].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                elif outcome is not None:
                    execution.respond(position, outcome, True)
            return None
        return [_response(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]

    def finalize(self) -> None:
        """Gives up the instance and the model."""
        self._instance.close()
        self._loaded.unload()

    def _received(self, request: Any) -> InferRequest:
        inputs = [
            Tensor(tensor.name(), tensor.datatype(), tensor.shape(), memoryview(tensor.content(0)))
            for tensor in request.inputs()
        ]
        received = InferRequest(self._name, id=request.request_id(), inputs=inputs)
        received.outputs = [
            RequestedOutput(name) for name in request.requested_output_names() if not name.startswith(STATE)
        ]
        received.correlation_id = request.correlation_id()
        received.sequence_flags = request.flags()
        received.timeout_us = request.timeout()
        received.parameters = json.loads(request.parameters())
        return received

    def _failed(self, execution: _Execution, error: WeirError) -> list[Any] | None:
        if self._is_decoupled:
            execution.fail(error)
            return None
        failure = WeirError(error.code, RAISED + error.message)
        return [_response(None, Result(error=failure)) for _ in execution.requests]


class _Execution(Execution):
    """Sends what a backend answers by itself as a Python model would."""

    __slots__ = ("_has_responded", "requests")

    def __init__(self, reader: PayloadReader, requests: list[Any]) -> None:
        super().__init__(reader)
        self.requests = requests
        self._has_responded = False

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """See `worker.backend.Execution`."""
        self._has_responded = True
        sender = self.requests[position].get_response_sender()
        if not sender.has_ended():
            sender.send(None if result is None else _response(None, result), _FINAL if is_final else 0)

    def fail(self, error: WeirError) -> None:
        """See `worker.backend.Execution`."""
        for position in range(len(self.requests)):
            self.respond(position, Result(error=error), True)

    def is_cancelled(self, position: int) -> bool:
        """See `worker.backend.Execution`."""
        return bool(self.requests[position].is_cancelled())

    @property
    def has_responded(self) -> bool:
        """See `worker.backend.Execution`."""
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
    outputs += [_sent(tensor, STATE + tensor.name) for tensor in outcome.states]
    return pb_utils.InferenceResponse(outputs, parameters=outcome.parameters)


def _sent(tensor: Tensor, name: str) -> Any:
    data = tensor.data
    if isinstance(data, tuple):
        raise internal(f"output '{name}' lies elsewhere")
    content = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) and len(data) else bytes(data)
    return pb_utils.Tensor.received(name, tensor.datatype, tensor.shape, content)


def _described(told: dict[str, Any]) -> dict[str, Any] | None:
    backend = backend_from(told["backend"])
    if not hasattr(backend, "describe"):  # a user's own may leave it out
        return None
    described = backend.describe(_model(told, None))
    if isinstance(described, DescribedModel):
        return {"tensors": [[list(row) for row in rows] for rows in described]}
    return {"config": config_to_json(described)} if isinstance(described, ModelConfig) else None


def _model(told: dict[str, Any], device: InstanceDevice | None) -> ModelVersion:
    config = config_from_dict(told["config"])
    if device is not None:
        # There is one instance here, however many there are in all.
        gpus = [device.device_id] if device.kind == "KIND_GPU" else []
        group: dict[str, Any] = {"name": device.name, "kind": device.kind, "count": 1, "gpus": gpus}
        config = config.replace(instance_group=[InstanceGroup(**group)])
    folder = Path(told["model_directory"])
    return ModelVersion(told["name"], told["version"], folder, config, settings=told["settings"])
