"""`InstanceBackend`: the base class of a backend with an object for each instance, on CPUs and GPUs.

The object has its device, may keep state, and may respond to a request several times. On a GPU its inputs and outputs are
in device memory, on the instance's stream; batches are copied while the one before them runs (`DeviceInstance`).
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from weir.repository.completion import DescribedModel
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import DATATYPES
from weir.worker.backend_api.interface import (
    Availability,
    DeviceLost,
    DeviceTensor,
    Execution,
    Instance,
    InstanceDevice,
    InstanceStream,
    LoadedModel,
    ModelVersion,
    Result,
    installed_version,
)
from weir.worker.backends.array import ArrayInstance, checked_output, declared_outputs
from weir.worker.cuda.arrays import DeviceArray, output_tensor
from weir.worker.cuda.buffers import BatchBuffers, size_of
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.cuda.pinned import HostBuffer
from weir.worker.cuda.stream import CudaStream, InstanceStreams
from weir.worker.devices.gpus import WorkerDevices, cuda_obstacle
from weir.worker.execution.batch_tensors import BatchAssembler, BatchInputs, BatchOutputs, NamedDatatype, ragged_inputs

Outputs = Mapping[str, Any]
"""Outputs of a batch by name: arrays of NumPy, or those of any library with `__dlpack__` or `__cuda_array_interface__`."""


class Device:
    """Where an instance runs: `kind` ("KIND_CPU", "KIND_GPU") and `id`, CUDA's number of the GPU."""

    def __init__(self, kind: str, id: int, stream: CudaStream | None = None) -> None:
        self.kind = kind
        self.id = id
        self._stream = stream

    @property
    def is_gpu(self) -> bool:
        """Whether inputs and outputs are in the memory of a GPU."""
        return self._stream is not None

    @property
    def stream(self) -> int:
        """The `cudaStream_t` of the instance, on which its work belongs; 0 on a CPU.

        `cupy.cuda.ExternalStream(device.stream)`, `torch.cuda.ExternalStream(device.stream)`.
        """
        return 0 if self._stream is None else self._stream.handle

    def empty(self, shape: Sequence[int], datatype: str) -> Any:
        """An uninitialized array for an output: a `DeviceArray` on a GPU, else of NumPy. `datatype` is Triton's ("FP32").

        Raises WeirError (UNAVAILABLE) if the GPU's memory is full.
        """
        if self._stream is None:
            return np.empty(tuple(shape), DATATYPES[datatype].numpy)
        memory = self._stream.allocate(size_of(datatype, shape))
        return DeviceArray(DeviceTensor(datatype, tuple(shape), memory.pointer, memory), self._stream)

    def pinned(self, shape: Sequence[int], datatype: str) -> np.ndarray:
        """An uninitialized array on the host that the GPU copies from and to asynchronously, within the worker's limit.

        Beyond the limit (`--pinned-memory-pool-byte-size`), and on a CPU, it is an ordinary one.
        """
        numpy_type, size = DATATYPES[datatype].numpy, size_of(datatype, shape)
        buffer = HostBuffer(size, wants_pinned=self._stream is not None)
        array: np.ndarray = buffer.array[:size].view(numpy_type).reshape(tuple(shape))
        return array

    def synchronize(self) -> None:
        """Waits until the instance's stream is idle. Raises DeviceLost if the GPU can't be used any more."""
        if self._stream is not None:
            self._stream.synchronize()


_AnyBackend = TypeVar("_AnyBackend", bound="InstanceBackend")


class InstanceBackend:
    """Base class: derive `Backend` from it and implement `setup`, `run` and, if there is something to release, `close`.

    Each instance of a model is an object of the class, created without arguments. All its methods are called in the thread
    of the instance.

    `kinds` are the kinds of instances that it can run, the preferred one last; `formats` the files that its models consist
    of; `requires` the modules that it imports (`setup` imports them), `requires_on_gpus` further ones for GPUs. There,
    `host_inputs` are inputs that it takes as
    arrays on the host, and with `can_capture` the run may be recorded as a CUDA graph (`DeviceRunner`).
    """

    kinds: Sequence[str] = ("KIND_CPU",)
    formats: Sequence[str] = ()
    requires: Sequence[str] = ()
    requires_on_gpus: Sequence[str] = ()
    host_inputs: Collection[str] = ()
    can_capture: bool = False

    def setup(self, model: ModelVersion, device: Device) -> None:
        """Loads the model for one instance. Raises WeirError, or any exception: the load fails with it."""

    def run(self, inputs: Mapping[str, Any]) -> Outputs | Iterator[Outputs]:
        """Runs a batch; returns its outputs by name.

        Inputs are read-only arrays of NumPy, on a GPU `DeviceArray`s (strings and `host_inputs` stay arrays of NumPy), and
        valid until the next call. A decoupled model gets each request by itself, and yields any number of outputs, each of
        which is a response. Requests of one batch take turns at each `yield`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Releases what the instance holds."""

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """The model's inputs and outputs, for completing its configuration; None where they are not known."""
        return None

    def availability(self, devices: WorkerDevices) -> Availability:
        """Which of `kinds` run on this machine: all need `requires`, and GPUs need a GPU and cuda-bindings."""
        missing = [module for module in self.requires if not _is_installed(module)]
        if missing:
            return Availability((), self.formats, "", [f"the module {name} is not installed" for name in missing])
        kinds, problems = list(self.kinds), []
        if "KIND_GPU" in kinds:
            problem = self._gpu_problem(devices)
            if problem:
                kinds.remove("KIND_GPU")
                problems.append(f"KIND_GPU: {problem}")
        version = installed_version(*self.requires) if self.requires else ""
        return Availability(kinds, self.formats, version, problems)

    def _gpu_problem(self, devices: WorkerDevices) -> str:
        if not devices.host_gpus:
            return "this machine has no GPU"
        if obstacle := cuda_obstacle():
            return obstacle
        missing = next((module for module in self.requires_on_gpus if not _is_installed(module)), "")
        return f"the module {missing} is not installed" if missing else ""

    def load(self, model: ModelVersion) -> LoadedModel:
        """Loads a version of a model: each of its instances is set up by itself."""
        return _LoadedModel(type(self), model)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class _LoadedModel:
    def __init__(self, kind: type[InstanceBackend], model: ModelVersion) -> None:
        self._kind = kind
        self._model = model
        self._outputs, self._states = declared_outputs(model.config)

    def create_instance(self, device: InstanceDevice) -> Instance:
        config, model, backend = self._model.config, self._model, self._kind()
        names = list(dict.fromkeys([*self._outputs, *self._states]))
        if device.kind != "KIND_GPU":
            backend.setup(model, Device(device.kind, device.device_id))
            if config.is_decoupled:
                return StreamingInstance(config, self._outputs, _OnHost(backend, names))
            return ArrayInstance(_HostRunner(backend, names), config, self._outputs, self._states)
        if config.is_decoupled:
            streams = InstanceStreams(device.device_id, own_copy_out=False)
            backend.setup(model, Device(device.kind, device.device_id, streams.compute))
            return StreamingInstance(config, self._outputs, _OnGpu(backend, names, streams))

        def opened(stream: InstanceStream) -> _GpuRunner:
            assert isinstance(stream, CudaStream)  # noqa: S101 - as `DeviceInstance` creates it
            backend.setup(model, Device(device.kind, device.device_id, stream))
            return _GpuRunner(backend, names, stream)

        return DeviceInstance(opened, device, config, self._outputs, self._states)

    def unload(self) -> None:
        pass


def _once(outputs: Any) -> Outputs:
    """The outputs of a model that is not decoupled."""
    if not isinstance(outputs, Mapping):
        hint = ": only decoupled models yield" if isinstance(outputs, Iterator) else ""
        raise internal(f"expected a dictionary of outputs, found type '{type(outputs).__name__}'{hint}")
    return outputs


def _named(outputs: Outputs, name: str) -> Any:
    if name not in outputs:
        raise internal(f"output '{name}' is missing")
    return outputs[name]


class _HostRunner:
    """An instance on a CPU, as an `ArrayRunner`."""

    def __init__(self, backend: InstanceBackend, names: Sequence[NamedDatatype]) -> None:
        self._backend = backend
        self._names = names

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        outputs = _once(self._backend.run(inputs))
        return [checked_output(name, datatype, outputs) for name, datatype in self._names]

    def close(self) -> None:
        self._backend.close()


class _GpuRunner:
    """An instance on a GPU, as a `DeviceRunner`."""

    def __init__(self, backend: InstanceBackend, names: Sequence[NamedDatatype], stream: CudaStream) -> None:
        self.host_inputs = backend.host_inputs
        self.can_capture = backend.can_capture
        self._backend = backend
        self._names = names
        self._stream = stream

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        outputs = _once(self._backend.run(_as_arrays(inputs, self._stream)))
        return [output_tensor(name, _named(outputs, name), datatype, self._stream) for name, datatype in self._names]

    def close(self) -> None:
        self._backend.close()


def _as_arrays(inputs: Mapping[str, DeviceTensor | np.ndarray], stream: CudaStream) -> dict[str, Any]:
    return {
        name: value if isinstance(value, np.ndarray) else DeviceArray(value, stream) for name, value in inputs.items()
    }


class _OnHost:
    """Where the tensors of a decoupled model are: arrays on the host."""

    def __init__(self, backend: InstanceBackend, names: Sequence[NamedDatatype]) -> None:
        self.backend = backend
        self._names = names

    def inputs(self, request: InferRequest, execution: Execution, assembler: BatchAssembler, batching: bool) -> Any:
        return assembler.assemble([request], batching, execution.reader), None

    def outputs(self, outputs: Outputs, _kept: Any) -> Sequence[np.ndarray]:
        return [checked_output(name, datatype, outputs) for name, datatype in self._names]

    def failed(self) -> None:
        """Nothing is on the way."""

    def close(self) -> None:
        self.backend.close()


class _OnGpu:
    """Where the tensors of a decoupled model are: on a GPU. Each open request has buffers of its own."""

    def __init__(self, backend: InstanceBackend, names: Sequence[NamedDatatype], streams: InstanceStreams) -> None:
        self.backend = backend
        self._names = names
        self._streams = streams
        self._free: list[BatchBuffers] = []

    def inputs(self, request: InferRequest, execution: Execution, assembler: BatchAssembler, batching: bool) -> Any:
        pieces, arrays = assembler.pieces([request], batching, execution.reader, self.backend.host_inputs)
        buffers = self._free.pop() if self._free else BatchBuffers(self._streams, True, True, spins=False)
        tensors: dict[str, DeviceTensor | np.ndarray] = {**buffers.copy_in(pieces), **arrays}
        return _as_arrays(tensors, self._streams.compute), buffers

    def outputs(self, outputs: Outputs, buffers: BatchBuffers) -> Sequence[np.ndarray]:
        stream = self._streams.compute
        found = [output_tensor(name, _named(outputs, name), datatype, stream) for name, datatype in self._names]
        arrays = buffers.copy_out(found)
        buffers.outputs_copied.synchronize("running a decoupled model")
        return arrays

    def ended(self, buffers: BatchBuffers) -> None:
        self._free.append(buffers)

    def failed(self) -> None:
        """Raises DeviceLost if the GPU can't be used any more, whatever the backend has raised."""
        self._streams.synchronize()

    def close(self) -> None:
        self._free.clear()
        self.backend.close()
        self._streams.trim()


class _OpenRequest:
    """A request of a decoupled model whose generator has not ended."""

    __slots__ = ("kept", "position", "request", "responses")

    def __init__(self, position: int, request: InferRequest, responses: Iterator[Outputs], kept: Any) -> None:
        self.position = position
        self.request = request
        self.responses = responses
        self.kept = kept


class StreamingInstance:
    """An instance of a decoupled model: runs a generator for each request, and sends a response at each `yield`.

    The requests of a batch take turns. A generator of a cancelled request is closed at its next turn.
    """

    def __init__(self, config: ModelConfig, outputs: Sequence[NamedDatatype], place: _OnHost | _OnGpu) -> None:
        self._place = place
        self._outputs = BatchOutputs(config, outputs)
        self._batching = config.max_batch_size > 0
        self._ragged = ragged_inputs(config)
        self._batch_inputs = BatchInputs(config) or None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        """Runs the requests to their ends; all responses are sent on the way."""
        waiting: deque[_OpenRequest] = deque()
        for position, request in enumerate(requests):
            self._guarded(execution, position, self._begin, position, request, execution, waiting)
        execution.input_ready()
        while waiting:
            opened = waiting.popleft()
            if self._guarded(execution, opened.position, self._turn, opened, execution):
                waiting.append(opened)
            elif isinstance(self._place, _OnGpu):
                self._place.ended(opened.kept)
        execution.inferred()
        return [None] * len(requests)

    def close(self) -> None:
        """Closes the backend."""
        self._place.close()

    def _begin(self, position: int, request: InferRequest, execution: Execution, waiting: deque[_OpenRequest]) -> None:
        # Assembled by an assembler of its own: its arrays are valid as long as the request is open.
        inputs, kept = self._place.inputs(request, execution, BatchAssembler(self._ragged), self._batching)
        if self._batch_inputs is not None:
            inputs |= self._batch_inputs.of([request])
        responses = self._place.backend.run(inputs)
        each: Iterable[Outputs] = (responses,) if isinstance(responses, Mapping) else responses
        waiting.append(_OpenRequest(position, request, iter(each), kept))

    def _turn(self, opened: _OpenRequest, execution: Execution) -> bool:
        """Runs a request to its next response; returns whether it goes on."""
        if execution.is_cancelled(opened.position):
            close = getattr(opened.responses, "close", None)
            if close is not None:
                close()
            execution.respond(opened.position, None, True)
            return False
        outputs = next(opened.responses, None)
        if outputs is None:
            execution.respond(opened.position, None, True)
            return False
        arrays = self._place.outputs(_once(outputs), opened.kept)
        (result,) = self._outputs.results([opened.request], arrays)
        execution.respond(opened.position, result, False)
        return True

    def _guarded(self, execution: Execution, position: int, act: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `act`; an exception of the backend ends its request alone."""
        try:
            return act(*arguments)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its request, and nothing else
            self._place.failed()
            failure = error if isinstance(error, WeirError) else internal(f"{type(error).__name__}: {error}")
            execution.respond(position, Result(error=failure), True)
            return False
