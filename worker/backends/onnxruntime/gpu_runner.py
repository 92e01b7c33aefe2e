"""Sessions of ONNX Runtime on a GPU, on the stream of one instance and in the memory of its device.

`OnnxDeviceRunner` runs each batch. `OnnxGraphRunner` runs batches that ONNX Runtime captures as CUDA graphs once and
then only replays. A graph contains the addresses and shapes it was captured with. There is therefore one for each
combination of input shapes, with tensors of its own; inputs are copied to them and outputs from them, on the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from schemas.core.errors import internal
from schemas.core.tensors import DATATYPES
from worker.backend_api.interface import DeviceRunner, DeviceTensor, InstanceStream, ModelVersion
from worker.backends.onnxruntime.options import OnnxOptions, captures_graphs, gpu_providers
from worker.backends.onnxruntime.session import open_session, run_error
from worker.backends.onnxruntime.tensors import STRING, array_of, bind_array, datatype, element_type

_GRAPH_ID = "gpu_graph_id"


def open_device_runner(
    library: Any, model: ModelVersion, options: OnnxOptions, outputs: Sequence[str], stream: InstanceStream
) -> DeviceRunner:
    """Opens a session for the instance of this stream, which returns `outputs`. Raises WeirError.

    Call it in the thread of the instance: captured graphs belong to that thread.
    """
    providers = gpu_providers(library, model.config, stream.device_id, stream.handle)
    session = open_session(library, model, options, providers)
    run_options = options.run_options(library, stream.device_id) or library.RunOptions()
    runner = OnnxDeviceRunner(session, outputs, stream.device_id, run_options)
    if not captures_graphs(model.config):
        return runner
    # The id -1 excludes runs of `runner`, whose addresses change, from capture and replay.
    run_options.add_run_config_entry(_GRAPH_ID, "-1")
    return OnnxGraphRunner(library, session, runner, outputs, stream)


class OnnxDeviceRunner:
    """Runs a session on device memory (`worker.backend_api.interface.DeviceRunner`). It completes `run_options`.

    Inputs and outputs that only operations on the CPU use stay on the host. The session must have no string inputs, which
    can't be bound from Python.
    """

    host_inputs: Collection[str]
    # Outputs lie in the session's arena, which may hand out their memory while a recorded graph still writes to it.
    can_capture = False

    def __init__(self, session: Any, outputs: Sequence[str], device_id: int, run_options: Any) -> None:
        self._session = session
        self._outputs = outputs
        self._device_id = device_id
        self._run_options = run_options
        inputs = session.get_inputs()
        self._input_types = {tensor.name: tensor.type for tensor in inputs}
        self._output_types = {tensor.name: tensor.type for tensor in session.get_outputs()}
        self.host_inputs = _host_tensors(inputs, session.get_input_memory_infos())
        self._host_outputs = _host_tensors(session.get_outputs(), session.get_output_memory_infos()) & set(outputs)
        if not self._host_outputs:
            # Outputs on the host require that ONNX Runtime waits for the device; otherwise only the stream is waited for.
            run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """Enqueues one batch."""
        # A new binding for each run: with a reused one the next run would write into the outputs of this one.
        binding = self._session.io_binding()
        kept = []
        for name, tensor in inputs.items():
            onnx_type = self._input_types[name]
            if isinstance(tensor, DeviceTensor):
                binding.bind_input(name, "cuda", self._device_id, element_type(onnx_type), tensor.shape, tensor.pointer)
            else:
                kept.append(bind_array(binding, name, onnx_type, tensor))
        for name in self._outputs:
            if name in self._host_outputs:
                binding.bind_output(name, "cpu", 0)
            else:
                binding.bind_output(name, "cuda", self._device_id)
        try:
            self._session.run_with_iobinding(binding, self._run_options)
        except Exception as error:
            raise run_error(error) from error
        del kept
        return [
            array_of(value) if name in self._host_outputs else self._device_tensor(name, value)
            for name, value in zip(self._outputs, binding.get_outputs(), strict=True)
        ]

    def close(self) -> None:
        """Releases the session."""
        del self._session

    def _device_tensor(self, name: str, value: Any) -> DeviceTensor:
        shape = tuple(value.shape())
        return DeviceTensor(datatype(self._output_types[name]).name, shape, value.data_ptr(), value)


def _host_tensors(tensors: Sequence[Any], memory: Sequence[Any]) -> frozenset[str]:
    return frozenset(
        tensor.name
        for tensor, place in zip(tensors, memory, strict=True)
        if tensor.type == STRING or place.name in ("Cpu", "CudaPinned")
    )


MAX_GRAPHS = 16
"""Graphs of one instance; runs with further combinations of shapes are not captured."""

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class OnnxGraphRunner:
    """Captures runs as CUDA graphs and replays them; `plain` runs batches that have no graph.

    A combination of shapes is captured when it occurs the second time, because the first run yields the shapes of outputs.
    """

    host_inputs: Collection[str] = ()
    can_capture = False  # ONNX Runtime captures by itself

    def __init__(
        self,
        library: Any,
        session: Any,
        plain: DeviceRunner,
        outputs: Sequence[str],
        stream: InstanceStream,
    ) -> None:
        if plain.host_inputs:
            raise internal(
                f"CUDA graphs need all inputs on the GPU, but these are on the host: {', '.join(sorted(plain.host_inputs))}"
            )
        self._library = library
        self._session = session
        self._plain = plain
        self._outputs = outputs
        self._stream = stream
        self._types = {tensor.name: tensor.type for tensor in (*session.get_inputs(), *session.get_outputs())}
        self._seen: dict[_Shapes, list[tuple[int, ...]]] = {}
        self._graphs: dict[_Shapes, _Graph] = {}

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """Enqueues one batch."""
        shapes = tuple((name, inputs[name].shape) for name in sorted(inputs))
        graph = self._graphs.get(shapes)
        if graph is None and shapes in self._seen:
            graph = self._graphs[shapes] = self._capture(shapes)
        if graph is not None:
            return self._replay(graph, inputs)
        outputs = self._plain.enqueue(inputs)
        if len(self._seen) < MAX_GRAPHS:
            self._seen[shapes] = [output.shape for output in outputs]
        return outputs

    def close(self) -> None:
        """Releases the session."""
        self._graphs.clear()
        del self._session
        self._plain.close()

    def _capture(self, shapes: _Shapes) -> _Graph:
        inputs = {name: self._tensor(name, shape) for name, shape in shapes}
        outputs = [self._tensor(name, shape) for name, shape in zip(self._outputs, self._seen[shapes], strict=True)]
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in zip(self._outputs, outputs, strict=True):
            binding.bind_ortvalue_output(name, value)
        options = self._library.RunOptions()
        options.add_run_config_entry(_GRAPH_ID, str(len(self._graphs) + 1))
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return _Graph(binding, inputs, outputs, options)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._library.OrtValue.ortvalue_from_shape_and_type(
            list(shape), element_type(self._types[name]), "cuda", self._stream.device_id
        )

    def _replay(self, graph: _Graph, inputs: Mapping[str, Any]) -> list[DeviceTensor]:
        for name, value in graph.inputs.items():
            tensor: DeviceTensor = inputs[name]
            self._copy_on_stream(value.data_ptr(), tensor.pointer, tensor.datatype, tensor.shape)
        try:
            self._session.run_with_iobinding(graph.binding, graph.run_options)
        except Exception as error:
            raise run_error(error) from error
        results: list[DeviceTensor] = []
        for name, value in zip(self._outputs, graph.outputs, strict=True):
            type_name, shape = datatype(self._types[name]).name, tuple(value.shape())
            # A copy, because the next replay overwrites the graph's output.
            memory = self._stream.allocate(_size_bytes(type_name, shape))
            self._copy_on_stream(memory.pointer, value.data_ptr(), type_name, shape)
            results.append(DeviceTensor(type_name, shape, memory.pointer, memory))
        return results

    def _copy_on_stream(self, target: int, source: int, type_name: str, shape: tuple[int, ...]) -> None:
        if size := _size_bytes(type_name, shape):
            copy_on_device(target, source, size, self._stream.handle)


class _Graph(NamedTuple):
    binding: Any
    inputs: dict[str, Any]
    outputs: list[Any]
    run_options: Any


def copy_on_device(target: int, source: int, size: int, stream: int) -> None:
    """Enqueues a copy within the device's memory on a `cudaStream_t`. Raises WeirError or DeviceLost."""
    from cuda.bindings import runtime

    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    (result,) = runtime.cudaMemcpyAsync(target, source, size, kind, stream)
    if result != runtime.cudaError_t.cudaSuccess:
        raise run_error(RuntimeError(f"CUDA failure {int(result)}: {result.name}"))


def _size_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DATATYPES[type_name].size_bytes
