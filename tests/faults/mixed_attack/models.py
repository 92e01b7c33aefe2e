"""The models that honest clients call and that the attacks target."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

SIMPLE = "simple"
"""Sum and difference of two INT32 vectors of 16; the main model of honest clients."""

FP32, BYTES, INT32 = "identity_fp32", "identity_bytes", "identity_int32"
"""Models that return their input; the first two batch."""

REPEAT = "repeat_int32"
"""Decoupled: one response for each element of its input, so none for an empty one."""

_IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""
_REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(-1):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([value], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """
backend: "python" max_batch_size: {batch}
input {{ name: "INPUT0" data_type: TYPE_{datatype} dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: [ -1 ] }}
instance_group {{ kind: KIND_CPU count: 1 }} {more}
"""


def write_models(repository: Path) -> None:
    """Write all models to `folder`."""
    _write_simple(repository / SIMPLE)
    _write(repository / FP32, _IDENTITY, _CONFIG.format(batch=8, datatype="FP32", more=""))
    _write(repository / BYTES, _IDENTITY, _CONFIG.format(batch=8, datatype="STRING", more=""))
    _write(repository / INT32, _IDENTITY, _CONFIG.format(batch=0, datatype="INT32", more=""))
    decoupled = "model_transaction_policy { decoupled: true }"
    _write(repository / REPEAT, _REPEAT, _CONFIG.format(batch=0, datatype="INT32", more=decoupled))


def _write(model: Path, code: str, config: str) -> None:
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(code)
    (model / "config.pbtxt").write_text(config)


def _write_simple(model: Path) -> None:
    names = ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    ends = [helper.make_tensor_value_info(name, TensorProto.INT32, [None, 16]) for name in names]
    nodes = [helper.make_node("Add", names[:2], names[2:3]), helper.make_node("Sub", names[:2], names[3:])]
    graph = helper.make_graph(nodes, SIMPLE, ends[:2], ends[2:])
    network = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (model / "1").mkdir(parents=True)
    onnx.save(network, str(model / "1" / "model.onnx"))
    (model / "config.pbtxt").write_text(
        'backend: "onnxruntime" max_batch_size: 32 dynamic_batching { } instance_group { kind: KIND_CPU count: 1 }'
    )
