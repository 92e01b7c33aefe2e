"""Python models: each instance is a child process of its own (`python_process`), which a keeper (`python_keeper`) minds.

A model that dies takes nobody with it: its batch is done again, and it is started anew.
"""

from __future__ import annotations

import ast
import json
import logging
import platform
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from repository.config_text import config_from_dict, config_to_json
from schemas.errors import WeirError
from schemas.model_config import ModelConfig
from schemas.requests import SEQUENCE_START, InferRequest
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
from worker.backends.python_environment import check_parameters, environment_of
from worker.backends.python_keeper import PythonKeeper
from worker.backends.python_limits import ProcessLimits
from worker.backends.python_messages import RESCHEDULED as AGAIN
from worker.backends.python_process import ProcessDied, PythonProcess, PythonRequest, PythonResponse, auto_complete
from worker.backends.python_responses import process_lost
from worker.devices import WorkerDevices

logger = logging.getLogger("weir.worker")

MAX_STARTED = 100_000
"""Sequences that an instance remembers to have begun since its process was replaced; those begun first are forgotten."""


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
        if self._code is None and not may_complete(model.directory / _filename(model)):
            return config
        place, environment = _place(model, self._code), environment_of(model)
        return config_from_dict(auto_complete(*place, config_to_json(config), environment=environment))

    def load(self, model: ModelVersion) -> LoadedModel:
        """Nothing is shared by instances but their environment, and what they count."""
        check_parameters(model.config)
        return _PythonModel(model, self._code)


class _PythonModel:
    starts_in_parallel = True
    """Each instance is a process of its own."""

    def __init__(self, model: ModelVersion, code: Path | None) -> None:
        self._model = model
        self._code = code
        self._environment = environment_of(model)
        self._metrics = None if model.calls is None else model.calls.metrics.of_load(model.name, model.version)

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
        limits = ProcessLimits.of(model.config, model.settings)

        def new_process(on_end: Callable[[PythonProcess], None]) -> PythonProcess:
            return PythonProcess(
                *_place(model, self._code),
                args,
                model.calls,
                self._environment,
                self._metrics,
                on_end=on_end,
                is_decoupled=model.config.is_decoupled,
                key=device.key,
            )

        keeps_state = model.config.sequence_batching is not None
        keeper = PythonKeeper(new_process, device.name, limits, model.health, keeps_state, key=device.key)
        keeper.start()
        return _PythonInstance(keeper, device.name, keeps_state)

    def unload(self) -> None:
        # Each instance has ended its own process.
        if self._metrics is not None:
            self._metrics.close()


class _PythonInstance:
    def __init__(self, keeper: PythonKeeper, name: str, keeps_state: bool) -> None:
        self._keeper = keeper
        self._name = name
        self._sequences = _Sequences() if keeps_state else None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        process = self._keeper.borrow()
        try:
            if self._sequences is not None:
                self._sequences.check(process, requests)
            return self._execute(process, requests, execution)
        finally:
            self._keeper.give_back()

    def _execute(
        self, process: PythonProcess, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None]:
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
            responses = process.execute(python_requests, sink)
        except ProcessDied as error:
            self._keeper.lost(process, str(error))
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
        self._keeper.close()


class _Sequences:
    """Notices requests of sequences that another process has begun, which has taken their state along."""

    def __init__(self) -> None:
        self._process: PythonProcess | None = None
        self._is_first = True
        self._started: dict[int | str, None] = {}

    def check(self, process: PythonProcess, requests: Sequence[InferRequest]) -> None:
        """Raises InstanceDied where a request goes on with a sequence that this process has not begun."""
        if self._process is not process:
            self._is_first = self._process is None
            self._process = process
            self._started.clear()
        if self._is_first:
            return
        started = self._started
        for request in requests:
            if request.sequence_flags & SEQUENCE_START:
                started[request.correlation_id] = None
        if any(request.correlation_id not in started for request in requests):
            started.clear()  # the scheduler ends all that are bound to this instance
            raise InstanceDied("its process has died, and with it the state of its sequences")
        while len(started) > MAX_STARTED:
            del started[next(iter(started))]


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
    return model.model_directory, model.version, _filename(model)


def _filename(model: ModelVersion) -> str:
    return model.config.default_model_filename or "model.py"


def may_complete(path: Path) -> bool:
    """Whether the model of this file may have an `auto_complete_config`; where it has not, no process need be asked.

    It has none if its class inherits from nothing and the file does not even mention the name.
    """
    try:
        source = path.read_bytes()
        if b"auto_complete_config" in source:
            return True
        module = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # the model's own interpreter tells what is wrong, if anything is
    name = "TritonPythonModel"
    is_plain = any(
        isinstance(node, ast.ClassDef)
        and node.name == name
        and not (node.bases or node.keywords or node.decorator_list)
        for node in module.body
    )
    is_replaced = any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"))
        for node in ast.walk(module)
    )
    return not is_plain or is_replaced


def _result(response: PythonResponse) -> Result:
    return Result(
        response.outputs,
        response.parameters,
        response.error,
        is_model_response=response.error is not None and not response.raised,
    )
