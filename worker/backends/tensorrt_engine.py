"""`TensorRtEngine`: a deserialized plan on one GPU, and what it says of its tensors and its optimization profiles.

TensorRT tells of failures by return values, which are all looked at here. A plan is bound to TensorRT's version and to the
kind of GPU it was made for, and it is code: it comes from a repository that is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from repository.completion import DescribedModel, DescribedTensor
from schemas.datatypes import BY_CONFIG_NAME
from schemas.errors import internal, invalid

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
"""Types of configurations by TensorRT's names; others (FP8, INT4, FP4) are for the inside of networks."""


class EngineTensor(NamedTuple):
    """One input or output. `shape` has -1 where it varies; `on_host` are shape tensors, which the CPU reads or writes."""

    name: str
    is_input: bool
    data_type: str
    shape: tuple[int, ...]
    on_host: bool

    @property
    def datatype(self) -> str:
        """Triton's name of the type in requests: "FP32"."""
        return BY_CONFIG_NAME[self.data_type].name


class ShapeRange(NamedTuple):
    """What one optimization profile allows of one input: its least, best and greatest shape."""

    least: tuple[int, ...]
    best: tuple[int, ...]
    greatest: tuple[int, ...]


class TensorRtEngine:
    """See the module. `trt` is the module `tensorrt`; the GPU must be the thread's current one. Raises WeirError."""

    def __init__(self, trt: Any, plan: bytes, logger: Any, version_compatible: bool = False) -> None:
        self.trt = trt
        # The runtime must outlive its engines.
        self._runtime = trt.Runtime(logger)
        if version_compatible:
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise internal("unable to load plan: TensorRT could not deserialize it, the log says why")
        self.tensors = [self._tensor(index) for index in range(self._engine.num_io_tensors)]
        self.profile_count: int = self._engine.num_optimization_profiles

    @property
    def inputs(self) -> list[EngineTensor]:
        """Its inputs, in its order."""
        return [tensor for tensor in self.tensors if tensor.is_input]

    @property
    def outputs(self) -> list[EngineTensor]:
        """Its outputs, in its order."""
        return [tensor for tensor in self.tensors if not tensor.is_input]

    def described(self) -> DescribedModel:
        """What it tells for completing a configuration."""
        return DescribedModel(
            inputs=[DescribedTensor(t.name, t.data_type, list(t.shape)) for t in self.inputs],
            outputs=[DescribedTensor(t.name, t.data_type, list(t.shape)) for t in self.outputs],
        )

    def ranges(self, profile: int) -> dict[str, ShapeRange]:
        """The shapes of inputs in device memory that profile number `profile` allows, by input."""
        found: dict[str, ShapeRange] = {}
        for tensor in self.inputs:
            if not tensor.on_host:
                shapes = self._engine.get_tensor_profile_shape(tensor.name, profile)
                found[tensor.name] = ShapeRange(*(tuple(shape) for shape in shapes))
        return found

    def create_context(self, strategy: str) -> Any:
        """A context for one instance. `strategy` is that of `execution_context_allocation_strategy`, "" for the default."""
        strategies = self.trt.ExecutionContextAllocationStrategy
        known = {"": strategies.STATIC, "STATIC": strategies.STATIC, "ON_PROFILE_CHANGE": strategies.ON_PROFILE_CHANGE}
        if strategy not in known:
            raise invalid(
                f"invalid value for 'execution_context_allocation_strategy': '{strategy}', known are STATIC and "
                "ON_PROFILE_CHANGE"
            )
        context = self._engine.create_execution_context(known[strategy])
        if context is None:
            raise internal("unable to create TensorRT context: perhaps there is too little memory on the GPU")
        return context

    def _tensor(self, index: int) -> EngineTensor:
        trt, engine = self.trt, self._engine
        name = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(name).name
        if kind not in CONFIG_TYPES:
            raise invalid(f"tensor '{name}' is of TensorRT's type {kind}, which requests can't carry")
        return EngineTensor(
            name,
            engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            CONFIG_TYPES[kind],
            tuple(engine.get_tensor_shape(name)),
            engine.get_tensor_location(name) == trt.TensorLocation.HOST,
        )


def profile_numbers(names: Sequence[str], count: int, model: str) -> list[int]:
    """The profiles of an instance group (`instance_group.profile`), by number; the first alone where it names none.

    Raises WeirError for one that the engine, which has `count`, does not have.
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
    """The profile for inputs of these shapes: of those that allow them, the one whose best shapes are nearest, as Triton.

    Raises WeirError (INVALID_ARG) when there is none.
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
