"""`OnnxDeviceRunner`: a session of ONNX Runtime that works on the stream of one instance, in the memory of its GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from worker.backend import ModelVersion
from worker.backends.onnxruntime_graphs import OnnxGraphRunner
from worker.backends.onnxruntime_options import OnnxOptions
from worker.backends.onnxruntime_providers import captures_graphs, gpu_providers
from worker.backends.onnxruntime_sessions import open_session, run_error
from worker.backends.onnxruntime_tensors import STRING, array_of, bind_array, datatype, element_type
from worker.device_runner import DeviceRunner, DeviceTensor, InstanceStream

_GRAPH_ID = "gpu_graph_id"


def open_device_runner(
    library: Any, model: ModelVersion, options: OnnxOptions, outputs: Sequence[str], stream: InstanceStream
) -> DeviceRunner:
    """A session of its own for the instance of this stream, which answers with `outputs`. Raises WeirError.

    To be called in the thread of the instance: captured graphs belong to it.
    """
    providers = gpu_providers(library, model.config, stream.device_id, stream.handle)
    session = open_session(library, model, options, providers)
    run_options = options.run_options(library, stream.device_id) or library.RunOptions()
    runner = OnnxDeviceRunner(session, outputs, stream.device_id, run_options)
    if not captures_graphs(model.config):
        return runner
    # Runs whose addresses change from one to the next are neither captured nor replayed.
    run_options.add_run_config_entry(_GRAPH_ID, "-1")
    return OnnxGraphRunner(library, session, runner, outputs, stream)


class OnnxDeviceRunner:
    """See the module, and `worker.device_runner.DeviceRunner`. `run_options` are completed.

    What the session takes and gives on the host stays there: what only operations on the CPU read or make. There are no
    strings among its inputs, which can't be bound from Python.
    """

    host_inputs: Collection[str]
    # What it allocates is its own arena's, which gives it to other runs while a recorded one still writes there.
    can_capture = False

    def __init__(self, session: Any, outputs: Sequence[str], device_id: int, run_options: Any) -> None:
        self._session = session
        self._outputs = outputs
        self._device_id = device_id
        self._run_options = run_options
        inputs = session.get_inputs()
        self._input_types = {tensor.name: tensor.type for tensor in inputs}
        self._output_types = {tensor.name: tensor.type for tensor in session.get_outputs()}
        self.host_inputs = _on_host(inputs, session.get_input_memory_infos())
        self._host_outputs = _on_host(session.get_outputs(), session.get_output_memory_infos()) & set(outputs)
        if not self._host_outputs:
            # What comes to the host is there only once ONNX Runtime has waited; all else waits for the stream.
            run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """See `worker.device_runner.DeviceRunner`."""
        # A binding that is used again would have the next run write into the outputs of this one.
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
        """See `worker.device_runner.DeviceRunner`."""
        del self._session

    def _device_tensor(self, name: str, value: Any) -> DeviceTensor:
        shape = tuple(value.shape())
        return DeviceTensor(datatype(self._output_types[name]).name, shape, value.data_ptr(), value)


def _on_host(tensors: Sequence[Any], memory: Sequence[Any]) -> frozenset[str]:
    return frozenset(
        tensor.name
        for tensor, place in zip(tensors, memory, strict=True)
        if tensor.type == STRING or place.name in ("Cpu", "CudaPinned")
    )
