"""ONNX Runtime: on the CPU all instances of a model version share one session, on GPUs each instance has its own.

`run` releases the GIL and sessions are thread-safe, so instances on the CPU are threads that share the weights. On a
GPU the stream belongs to the session, so each instance has a session with its own copy of the weights. Where they are
too large for that, the parameter `share_session_between_instances` gives the instances on a GPU one session. It uses
streams of its own, copies from and to the host itself, and each run waits for the device. Models with string inputs,
which Python can't bind to a session on a stream, also run that way.

Source of the parameters: Triton's ONNX Runtime backend.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weir.repository.completion import DescribedModel
from weir.schemas.core.errors import WeirError, invalid
from weir.worker.backend_api.interface import Availability, Instance, InstanceDevice, LoadedModel, ModelVersion
from weir.worker.backends.array import ArrayInstance, ArrayRunner
from weir.worker.backends.declarations import TensorDeclarations
from weir.worker.backends.onnxruntime.gpu_runner import open_device_runner
from weir.worker.backends.onnxruntime.options import CPU, OnnxOptions, cpu_providers, gpu_providers
from weir.worker.backends.onnxruntime.session import (
    NO_CUDA,
    NOT_INSTALLED,
    installation,
    library,
    open_session,
    preload_cuda,
    run_error,
)
from weir.worker.backends.onnxruntime.tensors import (
    BFLOAT16,
    STRING,
    array_of,
    bind_array,
    config_type,
    decoded,
    described,
    dims,
)
from weir.worker.devices.gpus import WorkerDevices, cuda_obstacle


class OnnxRuntimeBackend:
    """Describes and loads ONNX models (`weir.worker.backend_api.interface.Backend`)."""

    def availability(self, devices: WorkerDevices) -> Availability:
        """Any package of ONNX Runtime runs on the CPU, the one with the CUDA provider also on GPUs."""
        formats = ("model.onnx",)
        found = installation()
        if found is None:
            return Availability((), formats, "", (NOT_INSTALLED,))
        problems = [found.problem] if found.problem else []
        if not devices.host_gpus:
            problems.append("KIND_GPU: the driver reports no GPU on this machine")
        elif not found.has_cuda:
            problems.append(f"KIND_GPU: {NO_CUDA}")
        elif obstacle := cuda_obstacle():
            problems.append(f"KIND_GPU: {obstacle}")
        else:
            return Availability(("KIND_CPU", "KIND_GPU"), formats, found.version, tuple(problems))
        return Availability(("KIND_CPU",), formats, found.version, tuple(problems))

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The inputs and outputs of the graph; a dimension without a number is -1."""
        session = _describing_session(library(), model, OnnxOptions.of(model))
        return DescribedModel(
            inputs=[described(tensor) for tensor in session.get_inputs()],
            outputs=[described(tensor) for tensor in session.get_outputs()],
            defaulted=[described(tensor) for tensor in session.get_overridable_initializers()],
        )

    def load(self, model: ModelVersion) -> LoadedModel:
        """Opens the session of the instances on the CPU. Raises WeirError with ONNX Runtime's reason."""
        return _OnnxModel(model)


class _OnnxModel:
    runs_in_any_thread = True

    def __init__(self, model: ModelVersion) -> None:
        self._model = model
        self._library = library()
        self._options = OnnxOptions.of(model)
        self._session: Any = None
        self._shared: dict[int, Any] = {}
        self._lock = threading.Lock()
        groups = model.config.instance_group
        if groups and all(group.kind == "KIND_GPU" for group in groups):
            session = _describing_session(self._library, model, self._options)
        else:
            session = self._session = self._open(cpu_providers(self._library, model.config))
        self._has_string_inputs = any(tensor.type == STRING for tensor in session.get_inputs())
        declared = TensorDeclarations(
            {tensor.name: dims(tensor) for tensor in session.get_inputs()},
            {tensor.name: config_type(tensor.type) for tensor in session.get_outputs()},
        )
        declared.check_inputs(model.config)
        self._outputs = declared.outputs(model.config)
        self._states = declared.states(model.config)
        self._names = [tensor.name for tensor in dict.fromkeys([*self._outputs, *self._states])]
        if self._session is not None:
            self._options.run_options(self._library)

    def create_instance(self, device: InstanceDevice) -> Instance:
        config, device_id = self._model.config, device.device_id
        if device.kind != "KIND_GPU":
            return self._array_instance(self._session, None)
        with self._lock:
            preload_cuda(self._library)
        if self._options.shares_session or self._has_string_inputs:
            return self._array_instance(self._session_on(device_id), device_id)
        from weir.worker.cuda.device_instance import DeviceInstance

        def open_runner(stream: Any) -> Any:
            return open_device_runner(self._library, self._model, self._options, self._names, stream)

        instance: Instance = DeviceInstance(open_runner, device, config, self._outputs, self._states)
        return instance

    def unload(self) -> None:
        self._session = None
        self._shared.clear()

    def _array_instance(self, session: Any, device_id: int | None) -> Instance:
        run_options = self._options.run_options(self._library, device_id)
        types = {tensor.type for tensor in (*session.get_inputs(), *session.get_outputs())}
        if BFLOAT16 not in types:
            runner: ArrayRunner = _OnnxRunner(session, self._names, run_options)
        elif self._has_string_inputs:
            raise invalid(
                "a model with string inputs can't have tensors of BF16: ONNX Runtime accepts no arrays of BF16"
            )
        else:
            runner = _BoundRunner(session, self._names, run_options)
        return ArrayInstance(runner, self._model.config, self._outputs, self._states)

    def _session_on(self, device_id: int) -> Any:
        with self._lock:
            if device_id not in self._shared:
                providers = gpu_providers(self._library, self._model.config, device_id, None)
                self._shared[device_id] = self._open(providers)
            return self._shared[device_id]

    def _open(self, providers: Sequence[tuple[str, dict[str, str]]]) -> Any:
        return open_session(self._library, self._model, self._options, providers)


class _OnnxRunner:
    """Runs a session on arrays."""

    def __init__(self, session: Any, outputs: list[str], run_options: Any) -> None:
        self._session = session
        self._outputs = outputs
        self._run_options = run_options

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        strings = {name: decoded(name, array) for name, array in inputs.items() if array.dtype.hasobject}
        try:
            arrays: Sequence[np.ndarray] = self._session.run(
                self._outputs, {**inputs, **strings} if strings else inputs, self._run_options
            )
        except Exception as error:  # ONNX Runtime's errors have no other base
            raise run_error(error) from error
        return arrays

    def close(self) -> None:
        del self._session


class _BoundRunner:
    """Runs a session on the addresses of arrays, for types of which ONNX Runtime's Python interface has no arrays."""

    def __init__(self, session: Any, outputs: list[str], run_options: Any) -> None:
        self._session = session
        self._outputs = outputs
        self._run_options = run_options
        self._types = {tensor.name: tensor.type for tensor in session.get_inputs()}

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        binding = self._session.io_binding()
        kept = [bind_array(binding, name, self._types[name], array) for name, array in inputs.items()]
        try:
            for name in self._outputs:
                binding.bind_output(name, "cpu", 0)
            self._session.run_with_iobinding(binding, self._run_options)
        except Exception as error:
            raise run_error(error) from error
        del kept
        return [array_of(value) for value in binding.get_outputs()]

    def close(self) -> None:
        del self._session


def _describing_session(library: Any, model: ModelVersion, options: OnnxOptions) -> Any:
    """A session that is opened for its inputs and outputs and never run."""
    try:
        return open_session(library, model, options, [(CPU, {})], describing=True)
    except WeirError as error:
        # Some operations are implemented for GPUs only.
        if "NOT_IMPLEMENTED" not in error.message:
            raise
        for group in model.config.instance_group:
            if group.kind == "KIND_GPU" and group.gpus:
                preload_cuda(library)
                providers = gpu_providers(library, model.config, group.gpus[0], None)
                return open_session(library, model, options, providers, describing=True)
        raise
