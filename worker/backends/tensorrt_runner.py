"""`TensorRtRunner`: one instance of an engine, with an execution context of its own, on the stream of the instance."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from schemas.datatypes import DATATYPES, name_of_numpy
from schemas.errors import WeirError, internal, invalid
from worker.backend import DeviceLost
from worker.backends.tensorrt_engine import EngineTensor, TensorRtEngine, fitting_profile, profile_numbers
from worker.device_runner import DeviceMemory, DeviceTensor, InstanceStream


class TensorRtRunner:
    """See `worker.device_runner.DeviceRunner`. `outputs` are the names to be answered with, `profiles` as configured.

    Outputs whose size depends on what the inputs hold are allocated while the engine runs. Source of the calls and of what
    they return: the documentation of TensorRT 10 and 11, which are the same here.
    """

    def __init__(
        self,
        engine: TensorRtEngine,
        stream: InstanceStream,
        outputs: Sequence[str],
        model: str,
        profiles: Sequence[str] = (),
        strategy: str = "",
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._names = outputs
        self._model = model
        self._ranges = {
            number: engine.ranges(number) for number in profile_numbers(profiles, engine.profile_count, model)
        }
        self._profile: int | None = None
        self._context = engine.create_context(strategy)
        self._inputs = {tensor.name: tensor for tensor in engine.inputs}
        self.host_inputs: Collection[str] = frozenset(tensor.name for tensor in engine.inputs if tensor.on_host)
        # A change of profile can't be recorded, nor what the host reads while the engine runs.
        self.can_capture = not self.host_inputs and len(self._ranges) == 1
        self._allocators: dict[str, Any] = {}
        # Memory that the engine writes and nobody asked for, and that of the host it reads. Two batches may be under way.
        self._kept: deque[list[object]] = deque(maxlen=2)

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """See `worker.device_runner.DeviceRunner`."""
        for name in self._inputs.keys() - inputs.keys():
            raise invalid(f"nothing is given for input '{name}' of model '{self._model}', which its engine needs")
        self._choose_profile({name: tensor.shape for name, tensor in inputs.items()})
        kept: list[object] = []
        for name, tensor in inputs.items():
            self._bind_input(self._declared(name), tensor, kept)
        missing = self._context.infer_shapes()
        if missing:
            raise invalid(f"model '{self._model}' lacks what it needs to know of its inputs: {', '.join(missing)}")
        produced: dict[str, DeviceTensor | np.ndarray] = {}
        for output in self._engine.outputs:
            tensor_or_none = self._bind_output(output)
            if tensor_or_none is not None:
                produced[output.name] = tensor_or_none
        if not self._context.execute_async_v3(self._stream.handle):
            for allocator in self._allocators.values():
                allocator.raise_failure()
            raise internal(f"failed to run TensorRT inference of model '{self._model}': the log says why")
        for name, allocator in self._allocators.items():
            produced[name] = allocator.tensor(self._output(name).datatype)
        kept.extend(produced.values())
        self._kept.append(kept)
        return [produced[name] for name in self._names]

    def close(self) -> None:
        """See `worker.device_runner.DeviceRunner`."""
        self._allocators.clear()
        self._kept.clear()
        del self._context

    def _choose_profile(self, shapes: Mapping[str, Sequence[int]]) -> None:
        number = fitting_profile(self._ranges, shapes, self._model)
        if number != self._profile:
            # On the stream of the runs, so what follows on it sees the new profile.
            if not self._context.set_optimization_profile_async(number, self._stream.handle):
                raise internal(f"unable to set optimization profile {number} of model '{self._model}'")
            self._profile = number

    def _declared(self, name: str) -> EngineTensor:
        try:
            return self._inputs[name]
        except KeyError:
            raise invalid(
                f"unexpected inference input '{name}', allowed inputs are: {', '.join(sorted(self._inputs))}"
            ) from None

    def _output(self, name: str) -> EngineTensor:
        return next(tensor for tensor in self._engine.outputs if tensor.name == name)

    def _bind_input(self, declared: EngineTensor, tensor: DeviceTensor | np.ndarray, kept: list[object]) -> None:
        name = declared.name
        given = name_of_numpy(tensor.dtype) if isinstance(tensor, np.ndarray) else tensor.datatype
        if given != declared.datatype:
            # It would be read as what it is not, and perhaps beyond its end.
            raise invalid(
                f"input '{name}' of model '{self._model}' is {given}, but its engine takes {declared.datatype}: the "
                "configuration specifies another data type"
            )
        if not self._context.set_input_shape(name, tuple(tensor.shape)):
            raise invalid(f"model '{self._model}' does not take input '{name}' of shape {list(tensor.shape)}")
        if isinstance(tensor, np.ndarray):
            values = np.ascontiguousarray(tensor)
            kept.append(values)
            address = values.ctypes.data
        else:
            address = tensor.pointer
        if not self._context.set_tensor_address(name, address):
            raise internal(f"unable to bind input '{name}' of model '{self._model}'")

    def _bind_output(self, declared: EngineTensor) -> DeviceTensor | np.ndarray | None:
        """Memory for one output; None where the engine is to say how much of it there is to be."""
        name, numpy_type = declared.name, np.dtype(DATATYPES[declared.datatype].numpy)
        shape = tuple(self._context.get_tensor_shape(name))
        if declared.on_host:
            if -1 in shape:
                raise invalid(f"output '{name}' of model '{self._model}' is on the host, and tells its size too late")
            array = np.zeros(shape, numpy_type)
            self._set_address(name, array.ctypes.data)
            return array
        if -1 in shape:
            self._allocate_later(name)
            return None
        memory = self._stream.allocate(max(1, math.prod(shape) * numpy_type.itemsize))
        self._set_address(name, memory.pointer)
        return DeviceTensor(declared.datatype, shape, memory.pointer, memory)

    def _set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise internal(f"unable to bind output '{name}' of model '{self._model}'")

    def _allocate_later(self, name: str) -> None:
        if name in self._allocators:
            return
        allocator = output_allocator(self._engine.trt, self._stream)
        if not self._context.set_output_allocator(name, allocator):
            raise internal(f"unable to bind output '{name}' of model '{self._model}'")
        self._allocators[name] = allocator


def output_allocator(trt: Any, stream: InstanceStream) -> Any:
    """What TensorRT asks for the memory of one output, once it knows how large it is. Its methods are TensorRT's."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._memory: DeviceMemory | None = None
            self._shape: tuple[int, ...] = ()
            self._failure: WeirError | DeviceLost | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            # Always anew: the last run's output may still be read.
            try:
                self._memory = stream.allocate(max(1, size))
            except (WeirError, DeviceLost) as failure:
                self._failure = failure  # TensorRT, which called this, has no use for exceptions
                return 0
            return self._memory.pointer

        def reallocate_output_async(
            self, tensor_name: str, memory: int, size: int, alignment: int, stream_handle: int
        ) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self._shape = tuple(shape)

        def raise_failure(self) -> None:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

        def tensor(self, datatype: str) -> DeviceTensor:
            self.raise_failure()
            if self._memory is None:
                raise internal("TensorRT wrote an output without having asked for its memory")
            return DeviceTensor(datatype, self._shape, self._memory.pointer, self._memory)

    return OutputAllocator()
