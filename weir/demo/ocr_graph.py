"""The reading network of the OCR example, ended where its answer is small.

For each of some hundred columns of a line of text, the network of the `rapidocr-onnxruntime` package puts out how likely
each of 6625 characters is. Only the likeliest is ever looked at, so it is found inside the graph: what leaves is 2208
times smaller.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper


def as_reader(network: onnx.ModelProto) -> onnx.ModelProto:
    """The network with outputs CHARACTER int64 [k, columns], the likeliest character's index, and CERTAINTY fp32."""
    model = onnx.ModelProto()
    model.CopyFrom(network)
    graph = model.graph
    (likelihoods,) = (output.name for output in graph.output)
    graph.node.extend(
        [
            helper.make_node("ArgMax", [likelihoods], ["CHARACTER"], axis=2, keepdims=0),
            helper.make_node("ReduceMax", [likelihoods], ["CERTAINTY"], axes=[2], keepdims=0),
        ]
    )
    del graph.output[:]
    for name, datatype in (("CHARACTER", TensorProto.INT64), ("CERTAINTY", TensorProto.FLOAT)):
        graph.output.append(helper.make_tensor_value_info(name, datatype, ["lines", "columns"]))
    onnx.checker.check_model(model)
    return model


def characters(network: onnx.ModelProto) -> list[str]:
    """What the indices of CHARACTER mean. The first is the blank between two characters, the last the space."""
    (listed,) = (entry.value for entry in network.metadata_props if entry.key == "character")
    return ["", *listed.split("\n"), " "]
