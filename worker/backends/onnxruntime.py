"""ONNX Runtime: one session shared by all instances of a model version on the CPU.

`run` releases the GIL and sessions are thread-safe, so instances are threads and share the weights. One intra-op thread
each by default: more waste a third to a half of the CPU when cores are scarce. The configuration raises it by the
parameters of Triton's ONNX Runtime backend (`intra_op_thread_count`, `inter_op_thread_count`, `execution_mode`,
`optimization.graph.level`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from repository.completion import DescribedModel, DescribedTensor
from schemas.datatypes import BY_CONFIG_NAME
from schemas.errors import internal, invalid
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from worker.backend import Execution, Instance, InstanceDevice, LoadedModel, ModelVersion, Result
from worker.batch_inputs import BatchInputs
from worker.batch_tensors import BatchAssembler, ragged_inputs, split_outputs
from worker.scattered_outputs import scattered_outputs

_CONFIG_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(bfloat16)": "TYPE_BF16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}


class OnnxRuntimeBackend:
    """See `worker.backend.Backend`."""

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The graph's inputs and outputs; a dimension without a number is -1."""
        session = _open(model, ModelConfig(name=model.name))
        return DescribedModel(
            inputs=[_describe(tensor) for tensor in session.get_inputs()],
            outputs=[_describe(tensor) for tensor in session.get_outputs()],
            defaulted=[_describe(tensor) for tensor in session.get_overridable_initializers()],
        )

    def load(self, model: ModelVersion) -> LoadedModel:
        """Makes the session. Raises WeirError with ONNX Runtime's reason."""
        return _OnnxModel(model)


class _OnnxModel:
    def __init__(self, model: ModelVersion) -> None:
        self._config = model.config
        self._session = _open(model, model.config)
        declared = {tensor.name: _config_type(tensor.type) for tensor in self._session.get_outputs()}
        self._states = _state_outputs(model.config, declared, {tensor.name for tensor in self._session.get_inputs()})
        self._outputs: list[tuple[str, str]] = []
        for output in model.config.output:
            if output.name not in declared:
                raise invalid(
                    f"unexpected inference output '{output.name}', allowed outputs are: {', '.join(sorted(declared))}"
                )
            self._outputs.append((output.name, BY_CONFIG_NAME[declared[output.name]].name))
        _check_inputs(model.config, self._session)

    def create_instance(self, device: InstanceDevice) -> Instance:
        if device.kind == "KIND_GPU":
            raise invalid(f"instance {device.name} is of kind KIND_GPU but this worker runs ONNX Runtime on the CPU")
        return _OnnxInstance(self._session, self._outputs, self._states, self._config)

    def unload(self) -> None:
        del self._session


class _OnnxInstance:
    def __init__(
        self, session: Any, outputs: list[tuple[str, str]], states: list[tuple[str, str]], config: ModelConfig
    ) -> None:
        self._session = session
        self._outputs = outputs
        self._states = states
        self._datatypes = dict([*outputs, *states])
        self._batching = config.max_batch_size > 0
        self._assembler = BatchAssembler(ragged_inputs(config))
        self._batch_inputs = BatchInputs(config) or None
        self._scattered = scattered_outputs(config)

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
        inputs = self._assembler.assemble(requests, self._batching, execution.reader)
        for name, array in inputs.items():
            if array.dtype.hasobject:
                inputs[name] = _as_text(name, array)
        if self._batch_inputs is not None:
            inputs |= self._batch_inputs.of(requests)
        execution.input_ready()
        try:
            arrays = self._session.run(list(self._datatypes), inputs)
        except RuntimeError as error:  # ONNX Runtime's errors all derive from it
            raise internal(f"onnx runtime error: {error}") from error
        execution.inferred()
        if not self._states:
            outputs = [(name, datatype, array) for (name, datatype), array in zip(self._outputs, arrays, strict=True)]
            return [Result(tensors) for tensors in split_outputs(requests, outputs, self._batching, self._scattered)]
        by_name = dict(zip(self._datatypes, arrays, strict=True))
        outputs, states = (
            [(name, datatype, by_name[name]) for name, datatype in named] for named in (self._outputs, self._states)
        )
        return [
            Result(tensors, states=of_sequence)
            for tensors, of_sequence in zip(
                split_outputs(requests, outputs, self._batching, self._scattered),
                split_outputs(requests, states, self._batching, wanted_only=False),
                strict=True,
            )
        ]

    def close(self) -> None:
        del self._session


def _check_inputs(config: ModelConfig, session: Any) -> None:
    """Raises WeirError for inputs that the batch is to give the model otherwise than its graph takes them."""
    shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
    for name in ragged_inputs(config):
        shape = [dim if isinstance(dim, int) else -1 for dim in shapes.get(name, [-1])]
        if shape != [-1]:
            raise invalid(
                f"unable to load model '{config.name}', configuration expects model provides input with shape [-1]  "
                f"for ragged input '{name}', model provides [{','.join(map(str, shape))}]"
            )
    for name in BatchInputs(config).names:
        if name not in shapes:
            raise invalid(f"unexpected inference input '{name}', allowed inputs are: {', '.join(sorted(shapes))}")


def _state_outputs(config: ModelConfig, outputs: dict[str, str], inputs: set[str]) -> list[tuple[str, str]]:
    """(name, datatype) of the outputs that are states. Raises WeirError where the graph lacks what sequences need."""
    batching = config.sequence_batching
    if batching is None:
        return []
    for control_input in batching.control_input:
        if control_input.name not in inputs:
            raise internal(
                f"configuration specified sequence control '{control_input.name}', but model does not provide that input"
            )
    found: list[tuple[str, str]] = []
    for state in batching.state:
        if state.input_name not in inputs:
            raise invalid(
                f"unexpected sequence state input '{state.input_name}', allowed inputs are: {', '.join(sorted(inputs))}"
            )
        if state.output_name not in outputs:
            raise invalid(
                f"unexpected sequence state output '{state.output_name}', allowed outputs are: "
                f"{', '.join(sorted(outputs))}"
            )
        if outputs[state.output_name] != state.data_type:
            raise invalid(
                f"sequence state output '{state.output_name}' of model '{config.name}' is {outputs[state.output_name]}, "
                f"but the configuration specifies {state.data_type}"
            )
        found.append((state.output_name, BY_CONFIG_NAME[state.data_type].name))
    return found


def _open(model: ModelVersion, config: ModelConfig) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise internal("the onnxruntime package is not installed: install weir[cpu] or weir[gpu]") from error

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = _number(config, "intra_op_thread_count", 1)
    options.inter_op_num_threads = _number(config, "inter_op_thread_count", 1)
    if options.intra_op_num_threads > 1:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if _number(config, "execution_mode", 0):
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    level = config.optimization.graph.level if config.optimization and config.optimization.graph else 0
    options.graph_optimization_level = {
        -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    }.get(level, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
    path = model.directory / (config.default_model_filename or "model.onnx")
    if path.is_dir():
        path = path / "model.onnx"
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = str(error).replace(str(model.model_directory), model.name)
        raise internal(f"onnx runtime error: {text}") from error


def _as_text(name: str, array: np.ndarray) -> np.ndarray:
    # ONNX Runtime's Python interface takes `str` alone; of `bytes` it would take what `str(...)` makes of them.
    try:
        elements = [element.decode() for element in array.ravel()]
    except UnicodeDecodeError as error:
        raise invalid(f"input '{name}' holds a string that is not UTF-8") from error
    return np.array(elements, dtype=np.object_).reshape(array.shape)


def _number(config: ModelConfig, key: str, default: int) -> int:
    parameter = config.parameters.get(key)
    if parameter is None:
        return default
    try:
        return int(parameter.string_value)
    except ValueError as error:
        raise invalid(f"failed to parse parameter '{key}': '{parameter.string_value}' is not an integer") from error


def _config_type(onnx_type: str) -> str:
    try:
        return _CONFIG_TYPES[onnx_type]
    except KeyError as error:
        raise invalid(f"tensors of type {onnx_type} are not supported") from error


def _describe(tensor: Any) -> DescribedTensor:
    dims = [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in tensor.shape]
    return DescribedTensor(tensor.name, _config_type(tensor.type), dims)
