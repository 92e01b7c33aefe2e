"""`OnnxGraphRunner`: runs that ONNX Runtime captures as CUDA graphs once, and then only replays.

A graph holds the addresses and shapes of what it was captured with. So there is one for each combination of input shapes,
with tensors of its own, to which inputs are copied and from which outputs are, on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from schemas.datatypes import DATATYPES
from schemas.errors import internal
from worker.backends.onnxruntime_sessions import run_error
from worker.backends.onnxruntime_tensors import datatype, element_type
from worker.device_runner import DeviceRunner, DeviceTensor, InstanceStream

MAX_GRAPHS = 16
"""Graphs of one instance; runs with further combinations of shapes are not captured."""

Copy = Callable[[int, int, int, int], None]
"""Has a stream copy on its device: (target, source, bytes, `cudaStream_t`). Raises WeirError."""

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class OnnxGraphRunner:
    """See the module, and `worker.device_runner.DeviceRunner`. `plain` runs what has no graph.

    A combination of shapes is captured when it comes the second time: from the first run the shapes of outputs are known.
    """

    host_inputs: Collection[str] = ()
    can_capture = False  # not by others

    def __init__(
        self,
        library: Any,
        session: Any,
        plain: DeviceRunner,
        outputs: Sequence[str],
        stream: InstanceStream,
        copy: Copy | None = None,
    ) -> None:
        if plain.host_inputs:
            raise internal(f"CUDA graphs need inputs on the GPU, and {', '.join(sorted(plain.host_inputs))} is not")
        self._library = library
        self._session = session
        self._plain = plain
        self._outputs = outputs
        self._stream = stream
        self._copy = copy or copy_on_device
        self._types = {tensor.name: tensor.type for tensor in (*session.get_inputs(), *session.get_outputs())}
        self._seen: dict[_Shapes, list[tuple[int, ...]]] = {}
        self._graphs: dict[_Shapes, _Graph] = {}

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """See `worker.device_runner.DeviceRunner`."""
        shapes = tuple((name, inputs[name].shape) for name in sorted(inputs))
        graph = self._graphs.get(shapes)
        if graph is None and shapes in self._seen:
            graph = self._graphs[shapes] = self._prepared(shapes)
        if graph is not None:
            return self._replay(graph, inputs)
        outputs = self._plain.enqueue(inputs)
        if len(self._seen) < MAX_GRAPHS:
            self._seen[shapes] = [output.shape for output in outputs]
        return outputs

    def close(self) -> None:
        """See `worker.device_runner.DeviceRunner`."""
        self._graphs.clear()
        del self._session
        self._plain.close()

    def _prepared(self, shapes: _Shapes) -> _Graph:
        inputs = {name: self._tensor(name, shape) for name, shape in shapes}
        outputs = [self._tensor(name, shape) for name, shape in zip(self._outputs, self._seen[shapes], strict=True)]
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in zip(self._outputs, outputs, strict=True):
            binding.bind_ortvalue_output(name, value)
        options = self._library.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(len(self._graphs) + 1))
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
            # The next replay writes here, and what was returned must stay as it is.
            memory = self._stream.allocate(_size_bytes(type_name, shape))
            self._copy_on_stream(memory.pointer, value.data_ptr(), type_name, shape)
            results.append(DeviceTensor(type_name, shape, memory.pointer, memory))
        return results

    def _copy_on_stream(self, target: int, source: int, type_name: str, shape: tuple[int, ...]) -> None:
        if size := _size_bytes(type_name, shape):
            self._copy(target, source, size, self._stream.handle)


class _Graph(NamedTuple):
    binding: Any
    inputs: dict[str, Any]
    outputs: list[Any]
    run_options: Any


def copy_on_device(target: int, source: int, size: int, stream: int) -> None:
    """See `Copy`: by CUDA's runtime."""
    from cuda.bindings import runtime

    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    (result,) = runtime.cudaMemcpyAsync(target, source, size, kind, stream)
    if result != runtime.cudaError_t.cudaSuccess:
        raise run_error(RuntimeError(f"CUDA failure {int(result)}: {result.name}"))


def _size_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DATATYPES[type_name].size_bytes
