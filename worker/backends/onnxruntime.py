"""ONNX Runtime: one session shared by all instances of a model version on the CPU.

`run` releases the GIL and sessions are thread-safe, so instances are threads and share the weights. One intra-op thread
each by default: more waste a third to a half of the CPU when cores are scarce. The configuration raises it by the
parameters of Triton's ONNX Runtime backend (`intra_op_thread_count`, `inter_op_thread_count`, `execution_mode`,
`optimization.graph.level`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from repository.completion import DescribedModel, DescribedTensor
from schemas.errors import internal, invalid
from schemas.model_config import ModelConfig
from worker.array_instance import ArrayInstance
from worker.backend import Availability, Instance, InstanceDevice, LoadedModel, ModelVersion
from worker.devices import WorkerDevices
from worker.tensor_declarations import TensorDeclarations

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

    def availability(self, devices: WorkerDevices) -> Availability:
        """With either of ONNX Runtime's packages."""
        formats = ("model.onnx",)
        for package in ("onnxruntime", "onnxruntime-gpu"):
            try:
                return Availability(("KIND_CPU",), formats, metadata.version(package))
            except metadata.PackageNotFoundError:
                continue
        return Availability(
            (), formats, "", ("the onnxruntime package is not installed: install weir[cpu] or weir[gpu]",)
        )

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
        declared = TensorDeclarations(
            {tensor.name: _dims(tensor) for tensor in self._session.get_inputs()},
            {tensor.name: _config_type(tensor.type) for tensor in self._session.get_outputs()},
        )
        declared.check_inputs(model.config)
        self._outputs = declared.outputs(model.config)
        self._states = declared.states(model.config)

    def create_instance(self, device: InstanceDevice) -> Instance:
        if device.kind == "KIND_GPU":
            raise invalid(f"instance {device.name} is of kind KIND_GPU but this worker runs ONNX Runtime on the CPU")
        names = [tensor.name for tensor in dict.fromkeys([*self._outputs, *self._states])]
        return ArrayInstance(_OnnxRunner(self._session, names), self._config, self._outputs, self._states)

    def unload(self) -> None:
        del self._session


class _OnnxRunner:
    def __init__(self, session: Any, outputs: list[str]) -> None:
        self._session = session
        self._outputs = outputs

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        texts = {name: _as_text(name, array) for name, array in inputs.items() if array.dtype.hasobject}
        try:
            arrays: Sequence[np.ndarray] = self._session.run(self._outputs, {**inputs, **texts} if texts else inputs)
        except RuntimeError as error:  # ONNX Runtime's errors all derive from it
            raise internal(f"onnx runtime error: {error}") from error
        return arrays

    def close(self) -> None:
        del self._session


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
    return DescribedTensor(tensor.name, _config_type(tensor.type), _dims(tensor))


def _dims(tensor: Any) -> list[int]:
    return [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in tensor.shape]
