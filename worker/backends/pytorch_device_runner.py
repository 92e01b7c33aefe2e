"""`TorchDeviceRunner`: a PyTorch model on a GPU, on the stream of its instance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from worker.backends.pytorch_options import TorchOptions
from worker.backends.pytorch_runner import TorchCall, enter_modes
from worker.device_runner import DeviceTensor, InstanceStream
from worker.tensor_declarations import NamedDatatype


class TorchDeviceRunner:
    """See `worker.device_runner.DeviceRunner`. Made in the thread of its instance.

    What torch allocates during a call belongs to the stream, so it is given out again only for what the stream does
    later.
    """

    can_capture = False  # while a graph is recorded torch takes memory only from a pool of that graph
    host_inputs: Collection[str]

    def __init__(
        self,
        torch: Any,
        call: TorchCall,
        options: TorchOptions,
        outputs: Sequence[NamedDatatype],
        stream: InstanceStream,
    ) -> None:
        self.host_inputs = call.host_inputs
        self._torch = torch
        self._call = call
        self._outputs = outputs
        self._cleans_cache = options.cleans_cache
        self._device = f"cuda:{stream.device_id}"
        self._modes = ExitStack()
        enter_modes(torch, options, self._modes)
        self._modes.enter_context(torch.cuda.device(stream.device_id))
        external = torch.cuda.ExternalStream(stream.handle, device=self._device)
        self._modes.enter_context(torch.cuda.stream(external))

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """See `worker.device_runner.DeviceRunner`."""
        call, converter = self._call, self._call.converter
        arguments = {
            name: converter.device_tensor(tensor, self._device)
            if isinstance(tensor, DeviceTensor)
            else call.argument(name, tensor)
            for name, tensor in inputs.items()
        }
        found: list[DeviceTensor | np.ndarray] = []
        for output, value in zip(self._outputs, call.run(arguments), strict=True):
            if isinstance(value, self._torch.Tensor) and value.is_cuda:
                checked = converter.checked(output.name, value, output.datatype)
                found.append(converter.on_device(checked, output.datatype))
            else:
                found.append(converter.array(output.name, value, output.datatype))
        if self._cleans_cache:
            self._torch.cuda.empty_cache()
        return found

    def close(self) -> None:
        """See `worker.device_runner.DeviceRunner`."""
        self._modes.close()
        del self._call
