"""Sessions of ONNX Runtime on a GPU, on the stream of one instance and in the memory of its device.

They do not use CUDA graphs (`options.NO_GRAPHS`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from weir.worker.backend_api.interface import DeviceRunner, DeviceTensor, InstanceStream, ModelVersion
from weir.worker.backends.onnxruntime.options import OnnxOptions, gpu_providers
from weir.worker.backends.onnxruntime.session import open_session, run_error
from weir.worker.backends.onnxruntime.tensors import STRING, array_of, bind_array, datatype, element_type


def open_device_runner(
    library: Any, model: ModelVersion, options: OnnxOptions, outputs: Sequence[str], stream: InstanceStream
) -> DeviceRunner:
    """Opens a session for the instance of this stream, which returns `outputs`. Raises WeirError."""
    providers = gpu_providers(library, model.config, stream.device_id, stream.handle)
    session = open_session(library, model, options, providers)
    run_options = options.run_options(library, stream.device_id) or library.RunOptions()
    return OnnxDeviceRunner(session, outputs, stream.device_id, run_options)


class OnnxDeviceRunner:
    """Runs a session on device memory (`weir.worker.backend_api.interface.DeviceRunner`). It completes `run_options`.

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
