"""Versions of small ONNX models for the tests of the backend, and their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from weir.bus.payloads.arena import PayloadReader
from weir.repository.config_text import parse_config
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import Execution, ExecutionHandle, Instance, InstanceDevice, ModelVersion
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend

CPU = InstanceDevice("KIND_CPU", 0, "net_0")

TENSORS = """
input { name: "IN" data_type: TYPE_%s dims: [-1] }
output { name: "OUT" data_type: TYPE_%s dims: [-1] }
"""


def graph(
    operation: str = "Neg", onnx_type: int = TensorProto.FLOAT, domain: str = "", to: int | None = None
) -> onnx.ModelProto:
    """`OUT = operation(IN)`, with a batch and one more dimension; `to` is the type of OUT if it differs from that of IN."""
    attributes = {} if to is None else {"to": to}
    made = helper.make_graph(
        [helper.make_node(operation, ["IN"], ["OUT"], domain=domain, **attributes)],
        "graph",
        [helper.make_tensor_value_info("IN", onnx_type, ["batch", "width"])],
        [helper.make_tensor_value_info("OUT", onnx_type if to is None else to, ["batch", "width"])],
    )
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(made, opset_imports=opsets, ir_version=8)


def version(
    root: Path,
    config: str = "",
    model: onnx.ModelProto | None = None,
    datatype: str = "FP32",
    settings: Mapping[str, str] | None = None,
) -> ModelVersion:
    """Version 1 of model `net`, whose configuration ends with `config`."""
    folder = root / "net" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.onnx").exists():
        onnx.save(model or graph(), folder / "model.onnx")
    text = f'name: "net" backend: "onnxruntime" max_batch_size: 8 {TENSORS % (datatype, datatype)} {config}'
    return ModelVersion(
        "net", 1, root / "net", parse_config(text.encode(), "net/config.pbtxt"), settings=settings or {}
    )


def parameters(**values: str) -> str:
    """The configuration's `parameters`; `__` in a name stands for a dot."""
    return "\n".join(
        f'parameters {{ key: "{name.replace("__", ".")}" value {{ string_value: "{value}" }} }}'
        for name, value in values.items()
    )


def output_of(model: ModelVersion, array: np.ndarray, datatype: str = "FP32") -> np.ndarray:
    """The output of an instance on the CPU for this input."""
    instance = OnnxRuntimeBackend().load(model).create_instance(CPU)
    output = run_instance(instance, array, datatype)
    instance.close()
    return output


def run_instance(instance: Instance, array: np.ndarray, datatype: str = "FP32") -> np.ndarray:
    """The output of an instance for a request with this input."""
    request = InferRequest("net", inputs=[Tensor.from_numpy("IN", array, datatype)])
    results = instance.execute([request], Execution(PayloadReader()))
    assert not isinstance(results, ExecutionHandle)
    (result,) = results
    assert result is not None
    assert result.error is None
    return result.outputs[0].to_numpy()
