"""Python models: each instance runs in a process of its own, which a `ProcessSupervisor` keeps running.

A model that crashes affects neither the worker nor other instances: its batch is run again by another process.
"""

from __future__ import annotations

import ast
import json
import logging
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from weir.repository.config_text import config_from_dict, config_to_json
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal
from weir.schemas.core.requests import SEQUENCE_START, InferRequest
from weir.worker.backend_api.interface import (
    Availability,
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    LoadedModel,
    ModelVersion,
    Result,
)
from weir.worker.backends.python.channel import stream_lost
from weir.worker.backends.python.environment import check_parameters, environment_of
from weir.worker.backends.python.microbatch import ProcessMicrobatch
from weir.worker.backends.python.process import ProcessDied, ProcessSpec, PythonProcess, auto_complete
from weir.worker.backends.python.supervisor import ProcessLimits, ProcessSupervisor, SupervisedInstance
from weir.worker.devices.gpus import WorkerDevices, cuda_obstacle

logger = logging.getLogger("weir.worker")

MAX_TRACKED_SEQUENCES = 100_000
"""Sequences that an instance remembers as started by its replaced process; beyond that the oldest are forgotten."""


class PythonBackend:
    """Runs the models of Triton's Python backend (`weir.worker.backend_api.interface.Backend`).

    With `code` it is one of Triton's Python-based backends: that file is the code of all its models, whose folders hold
    whatever the code reads. Source: Triton 2.51, observed.
    """

    def __init__(self, code: Path | None = None) -> None:
        self._code = code

    def availability(self, devices: WorkerDevices) -> Availability:
        """Python models run on every machine, and use a GPU by libraries of their own."""
        formats = ("model.py",) if self._code is None else ()
        version = platform.python_version()
        if not devices.host_gpus:
            return Availability(("KIND_CPU", "KIND_MODEL"), formats, version)
        if obstacle := cuda_obstacle():
            return Availability(("KIND_CPU", "KIND_MODEL"), formats, version, (f"KIND_GPU: {obstacle}",))
        return Availability(("KIND_CPU", "KIND_GPU", "KIND_MODEL"), formats, version)

    def describe(self, model: ModelVersion) -> ModelConfig | None:
        """The configuration as the model's `auto_complete_config` completes it."""
        self._check_file(model)
        config = model.config if self._code is None else model.config.replace(runtime=self._code.name)
        if self._code is None and not may_auto_complete(model.directory / _filename(model)):
            return config
        spec = ProcessSpec(*_location(model, self._code), environment=environment_of(model))
        return config_from_dict(auto_complete(spec, config_to_json(config)))

    def load(self, model: ModelVersion) -> LoadedModel:
        """Prepares the environment that the instances share; each instance loads the model in its own process."""
        self._check_file(model)
        return PythonModel(model, self._code)

    def _check_file(self, model: ModelVersion) -> None:
        """Raises WeirError (INTERNAL), in Triton's words, unless the model's file exists."""
        file = model.directory / _filename(model)
        if self._code is None and not file.exists():
            logger.error("Python model file not found in '%s'", file)
            raise internal(f"Python model file not found in '{model.directory.name}/{file.name}'")


class PythonModel:
    """A loaded model whose instances are processes (`weir.worker.backend_api.interface.LoadedModel`).

    `code` is as in `PythonBackend`. Raises WeirError for invalid parameters, and for an environment that can't be created.
    """

    starts_in_parallel = True
    is_isolated = True

    def __init__(self, model: ModelVersion, code: Path | None) -> None:
        check_parameters(model.config)
        self._model = model
        self._code = code
        self._environment = environment_of(model)
        self._metrics = None if model.calls is None else model.calls.metrics.of_load(model.name, model.version)

    def create_instance(self, device: InstanceDevice) -> Instance:
        """Starts a process, and loads the model there. Raises WeirError."""
        return self._start(self._model, device)

    def _start(self, model: ModelVersion, device: InstanceDevice) -> Instance:
        kind = device.kind.removeprefix("KIND_")
        arguments = {
            "model_config": json.dumps(config_to_json(model.config)),
            "model_instance_kind": "CPU" if kind == "AUTO" else kind,
            "model_instance_name": device.name,
            "model_instance_device_id": str(device.device_id),
            "model_repository": str(model.model_directory),
            "model_version": str(model.version),
            "model_name": model.name,
        }
        spec = ProcessSpec(
            *_location(model, self._code),
            arguments,
            calls=model.calls,
            environment=self._environment,
            metrics=self._metrics,
            is_decoupled=model.config.is_decoupled,
            key=device.key,
        )

        def new_process(on_end: Callable[[PythonProcess], None]) -> PythonProcess:
            return PythonProcess(spec, on_end)

        instance = SupervisedInstance(
            name=device.name,
            key=device.key,
            limits=ProcessLimits.of(model.config, model.settings),
            keeps_state=model.config.sequence_batching is not None,
        )
        supervisor = ProcessSupervisor(new_process, instance, model.health)
        supervisor.start()
        return _PythonInstance(supervisor, instance)

    def unload(self) -> None:
        """Releases the custom metrics. Each instance has ended its own process."""
        if self._metrics is not None:
            self._metrics.close()


class _PythonInstance:
    def __init__(self, supervisor: ProcessSupervisor, instance: SupervisedInstance) -> None:
        self._supervisor = supervisor
        self._name = instance.name
        self._sequences = _SequenceTracker() if instance.keeps_state else None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        process = self._supervisor.acquire()
        try:
            if self._sequences is not None:
                self._sequences.check(process, requests)
            execution.input_ready()
            return process.execute(requests, execution)
        except ProcessDied as error:
            self._supervisor.ended(process, str(error))
            if execution.has_responded:
                # The batch can't run again: its clients may have read some of the responses.
                logger.warning("%s: %s; its open streams fail", self._name, error)
                return [Result(error=stream_lost())] * len(requests)
            raise InstanceDied(str(error)) from error
        finally:
            execution.inferred()
            self._supervisor.release()

    def start_microbatch(self, requests: Sequence[InferRequest], execution: Execution) -> ProcessMicrobatch:
        process = self._supervisor.acquire()

        def closed(microbatch: ProcessMicrobatch) -> None:
            if microbatch.death:
                self._supervisor.ended(process, microbatch.death)
            self._supervisor.release()

        try:
            execution.input_ready()
            return process.start_microbatch(requests, execution, closed)
        except BaseException as error:
            if isinstance(error, ProcessDied):
                self._supervisor.ended(process, str(error))
            self._supervisor.release()
            if isinstance(error, ProcessDied):
                raise InstanceDied(str(error)) from error
            raise

    def close(self) -> None:
        self._supervisor.close()


class _SequenceTracker:
    """Detects requests of sequences that an earlier process has started: their state is lost with that process."""

    def __init__(self) -> None:
        self._process: PythonProcess | None = None
        self._is_first = True
        self._started: dict[int | str, None] = {}

    def check(self, process: PythonProcess, requests: Sequence[InferRequest]) -> None:
        """Raises InstanceDied where a request continues a sequence that this process has not started."""
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
            started.clear()  # the scheduler ends all sequences that are bound to this instance
            raise InstanceDied("its process has died, and the state of its sequences is lost")
        while len(started) > MAX_TRACKED_SEQUENCES:
            del started[next(iter(started))]


def _location(model: ModelVersion, code: Path | None) -> tuple[Path, int | None, str]:
    """Where the code lies: a folder, the version's folder in it (None: none), and the name of the file in that."""
    if code is not None:
        return code.parent, None, code.name
    return model.model_directory, model.version, _filename(model)


def _filename(model: ModelVersion) -> str:
    return model.config.default_model_filename or "model.py"


def may_auto_complete(path: Path) -> bool:
    """Whether the model in this file may have an `auto_complete_config`. If not, no process needs to be started for it.

    It has none if its class has no base class and the file does not even mention the name.
    """
    try:
        source = path.read_bytes()
        if b"auto_complete_config" in source:
            return True
        module = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # the model's own interpreter reports what is wrong
    name = "TritonPythonModel"
    is_plain = any(
        isinstance(node, ast.ClassDef)
        and node.name == name
        and not (node.bases or node.keywords or node.decorator_list)
        for node in module.body
    )
    is_rebound = any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"))
        for node in ast.walk(module)
    )
    return not is_plain or is_rebound
