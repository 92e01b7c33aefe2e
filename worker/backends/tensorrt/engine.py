"""`TensorRtEngine`: a deserialized plan on one GPU, with its tensors and optimization profiles.

`TensorRtRunner` runs it in an execution context of one instance. TensorRT reports failures by return values, all of
which are checked here. A plan is bound to TensorRT's version and to the kind of GPU it was built for. It contains code,
so it must come from a trusted repository.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weir.repository.completion import DescribedModel, DescribedTensor
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, name_of_numpy
from weir.worker.backend_api.interface import DeviceLost, DeviceMemory, DeviceTensor, InstanceStream

CONFIG_TYPES: Mapping[str, str] = {
    "BOOL": "TYPE_BOOL",
    "UINT8": "TYPE_UINT8",
    "INT8": "TYPE_INT8",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "HALF": "TYPE_FP16",
    "BF16": "TYPE_BF16",
    "FLOAT": "TYPE_FP32",
}
"""Types in configurations by TensorRT's names. Its other types (FP8, INT4, FP4) occur only within networks."""


class EngineTensor(NamedTuple):
    """One input or output. Variable dimensions of `shape` are -1; shape tensors, which the CPU uses, are `on_host`."""

    name: str
    is_input: bool
    data_type: str
    shape: tuple[int, ...]
    on_host: bool

    @property
    def datatype(self) -> str:
        """Triton's name of the type in requests ("FP32")."""
        return BY_CONFIG_NAME[self.data_type].name


class ShapeRange(NamedTuple):
    """The shapes that one optimization profile allows for one input: least, best and greatest."""

    least: tuple[int, ...]
    best: tuple[int, ...]
    greatest: tuple[int, ...]


class TensorRtEngine:
    """Deserializes a plan on the calling thread's current GPU. `trt` is the module `tensorrt`. Raises WeirError."""

    def __init__(self, trt: Any, plan: bytes, logger: Any, version_compatible: bool = False) -> None:
        self.trt = trt
        # The runtime must exist as long as its engines.
        self._runtime = trt.Runtime(logger)
        if version_compatible:
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise internal("unable to load plan: TensorRT could not deserialize it, see the worker's log")
        self.tensors = [self._tensor(index) for index in range(self._engine.num_io_tensors)]
        self.profile_count: int = self._engine.num_optimization_profiles

    @property
    def inputs(self) -> list[EngineTensor]:
        """The inputs, in the engine's order."""
        return [tensor for tensor in self.tensors if tensor.is_input]

    @property
    def outputs(self) -> list[EngineTensor]:
        """The outputs, in the engine's order."""
        return [tensor for tensor in self.tensors if not tensor.is_input]

    def described(self) -> DescribedModel:
        """The inputs and outputs, for completing a configuration; the largest batch is that of the first profile."""
        batches = [found.greatest[0] for found in self.ranges(0).values() if found.greatest]
        return DescribedModel(
            inputs=[DescribedTensor(t.name, t.data_type, list(t.shape)) for t in self.inputs],
            outputs=[DescribedTensor(t.name, t.data_type, list(t.shape)) for t in self.outputs],
            largest_batch=min(batches, default=None),
        )

    def ranges(self, profile: int) -> dict[str, ShapeRange]:
        """The shapes that profile number `profile` allows, for each input in device memory."""
        found: dict[str, ShapeRange] = {}
        for tensor in self.inputs:
            if not tensor.on_host:
                shapes = self._engine.get_tensor_profile_shape(tensor.name, profile)
                found[tensor.name] = ShapeRange(*(tuple(shape) for shape in shapes))
        return found

    def check_formats(self, profile: int) -> None:
        """Raises WeirError if a tensor is not laid out row by row in this profile, as the tensors of requests are."""
        for tensor in self.tensors:
            # The lean runtime's bindings have no class for the formats themselves.
            layout = self._engine.get_tensor_format_desc(tensor.name, profile)
            if "(kLINEAR)" not in layout:
                raise invalid(
                    f"tensor '{tensor.name}' has TensorRT's format \"{layout}\", which requests can't contain: build the "
                    "engine with format LINEAR for its inputs and outputs"
                )

    def create_context(self, strategy: str) -> Any:
        """A context for one instance; `strategy` is `execution_context_allocation_strategy`, "" for the default."""
        strategies = self.trt.ExecutionContextAllocationStrategy
        known = {"": strategies.STATIC, "STATIC": strategies.STATIC, "ON_PROFILE_CHANGE": strategies.ON_PROFILE_CHANGE}
        if strategy not in known:
            raise invalid(
                f"invalid value for 'execution_context_allocation_strategy': '{strategy}', valid are STATIC and "
                "ON_PROFILE_CHANGE"
            )
        context = self._engine.create_execution_context(known[strategy])
        if context is None:
            raise internal("unable to create TensorRT context: the GPU may have too little free memory")
        return context

    def _tensor(self, index: int) -> EngineTensor:
        trt, engine = self.trt, self._engine
        name = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(name).name
        if kind not in CONFIG_TYPES:
            raise invalid(f"tensor '{name}' has TensorRT's type {kind}, which requests can't contain")
        return EngineTensor(
            name,
            engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            CONFIG_TYPES[kind],
            tuple(engine.get_tensor_shape(name)),
            engine.get_tensor_location(name) == trt.TensorLocation.HOST,
        )


def profile_numbers(names: Sequence[str], count: int, model: str) -> list[int]:
    """The numbers of the profiles of an instance group (`instance_group.profile`), by default the first profile.

    `count` is the number of profiles of the engine. Raises WeirError for others.
    """
    numbers: list[int] = []
    for name in names or ("0",):
        if not name.isdecimal() or int(name) >= count:
            raise invalid(f"unable to load model '{model}', it has no optimization profile '{name}', of {count}")
        numbers.append(int(name))
    return numbers


def fitting_profile(
    ranges: Mapping[int, Mapping[str, ShapeRange]], shapes: Mapping[str, Sequence[int]], model: str
) -> int:
    """The profile for inputs of these shapes: of those that allow them, as in Triton, the one with the nearest best shapes.

    Raises WeirError (INVALID_ARG) if no profile allows them.
    """
    fitting = [number for number, allowed in ranges.items() if _problem(allowed, shapes, model) is None]
    if not fitting:
        first = next(iter(ranges.values()))
        raise invalid(_problem(first, shapes, model) or "no optimization profile allows the shapes of the request")
    return min(fitting, key=lambda number: _distance(ranges[number], shapes))


def _problem(allowed: Mapping[str, ShapeRange], shapes: Mapping[str, Sequence[int]], model: str) -> str | None:
    for name, limits in allowed.items():
        shape = shapes[name]
        if len(shape) != len(limits.best):
            return (
                f"unexpected shape for input '{name}' for model '{model}'. Expected {len(limits.best)} dimensions, got "
                f"{len(shape)}"
            )
        for axis, (size, least, greatest) in enumerate(zip(shape, limits.least, limits.greatest, strict=True)):
            if not least <= size <= greatest:
                return (
                    f"request specifies invalid shape for input '{name}' for model '{model}'. Error details: model "
                    f"expected the shape of dimension {axis} to be between {least} and {greatest} but received {size}"
                )
    return None


def _distance(allowed: Mapping[str, ShapeRange], shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(
        abs(size - best)
        for name, limits in allowed.items()
        for size, best in zip(shapes[name], limits.best, strict=True)
    )


class RunnerOptions(NamedTuple):
    """Configured options of a runner: optimization profiles by name, and the strategy that allocates its context."""

    profiles: Sequence[str] = ()
    allocation_strategy: str = ""


NO_OPTIONS = RunnerOptions()


class TensorRtRunner:
    """Runs an engine on the stream of an instance (`weir.worker.backend_api.interface.DeviceRunner`); returns `outputs`.

    Outputs whose size depends on the values of inputs are allocated while the engine runs. The calls and their return
    values are documented identically for TensorRT 10 and 11.
    """

    def __init__(
        self,
        engine: TensorRtEngine,
        stream: InstanceStream,
        outputs: Sequence[str],
        model: str,
        options: RunnerOptions = NO_OPTIONS,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._names = outputs
        self._model = model
        self._options = options
        self._ranges = {
            number: engine.ranges(number) for number in profile_numbers(options.profiles, engine.profile_count, model)
        }
        for number in self._ranges:
            engine.check_formats(number)
        self._profile: int | None = None
        self._context = engine.create_context(options.allocation_strategy)
        self._inputs = {tensor.name: tensor for tensor in engine.inputs}
        self.host_inputs: Collection[str] = frozenset(tensor.name for tensor in engine.inputs if tensor.on_host)
        # Neither a change of profile nor inputs that the host reads can be part of a CUDA graph.
        self.can_capture = not self.host_inputs and len(self._ranges) == 1
        self._allocators: dict[str, Any] = {}
        # Outputs that are not returned, and host memory that the engine reads, for the two batches that may be open.
        self._kept: deque[list[object]] = deque(maxlen=2)

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """Enqueues one batch."""
        for name in self._inputs.keys() - inputs.keys():
            raise invalid(f"the engine of model '{self._model}' requires input '{name}', which the request lacks")
        self._choose_profile({name: tensor.shape for name, tensor in inputs.items()})
        kept: list[object] = []
        for name, tensor in inputs.items():
            self._bind_input(self._declared(name), tensor, kept)
        missing = self._context.infer_shapes()
        if missing:
            raise invalid(f"model '{self._model}' lacks the shapes or values of inputs: {', '.join(missing)}")
        produced: dict[str, DeviceTensor | np.ndarray] = {}
        for output in self._engine.outputs:
            tensor_or_none = self._bind_output(output)
            if tensor_or_none is not None:
                produced[output.name] = tensor_or_none
        if not self._context.execute_async_v3(self._stream.handle):
            for allocator in self._allocators.values():
                allocator.raise_failure()
            raise internal(f"failed to run TensorRT inference of model '{self._model}': see the worker's log")
        for name, allocator in self._allocators.items():
            produced[name] = allocator.tensor(self._output(name).datatype)
        kept.extend(produced.values())
        self._kept.append(kept)
        return [produced[name] for name in self._names]

    def for_graph(self) -> TensorRtRunner:
        """A runner with a context of its own: a graph must not run after its context was given other shapes.

        Source: "CUDA Graphs" in TensorRT's developer guide.
        """
        return TensorRtRunner(self._engine, self._stream, self._names, self._model, self._options)

    def close(self) -> None:
        """Releases the context."""
        self._allocators.clear()
        self._kept.clear()
        del self._context

    def _choose_profile(self, shapes: Mapping[str, Sequence[int]]) -> None:
        number = fitting_profile(self._ranges, shapes, self._model)
        if number != self._profile:
            # On the stream of the runs, so that later work on it uses the new profile.
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
            # The engine would misinterpret its content, and might read beyond its end.
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
        """Memory for one output; None where the engine determines its size while it runs."""
        name, numpy_type = declared.name, np.dtype(DATATYPES[declared.datatype].numpy)
        shape = tuple(self._context.get_tensor_shape(name))
        if declared.on_host:
            if -1 in shape:
                raise invalid(
                    f"output '{name}' of model '{self._model}' is on the host and of variable size: not supported"
                )
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
    """An allocator that TensorRT calls for one output once its size is known. Its methods are TensorRT's."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._memory: DeviceMemory | None = None
            self._shape: tuple[int, ...] = ()
            self._failure: WeirError | DeviceLost | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            # New memory for each run: the previous output may still be read.
            try:
                self._memory = stream.allocate(max(1, size))
            except (WeirError, DeviceLost) as failure:
                self._failure = failure  # TensorRT, which calls this, can't handle exceptions
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
                raise internal("TensorRT wrote an output without allocating its memory")
            return DeviceTensor(datatype, self._shape, self._memory.pointer, self._memory)

    return OutputAllocator()
