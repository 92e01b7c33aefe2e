"""Silero's voice activity detector as a model that Triton's sequence batcher can batch.

The network of the `silero-vad` package hears 512 samples at a time and remembers the rest in two places: a state, which
goes in and out with the streams of the batch on axis 1, and the last 64 samples of the chunk before, which the package
keeps in Python. Implicit state wants both in the graph, with the streams on axis 0. So the network is wrapped: same
weights, same nodes, other inputs and outputs.
"""

from __future__ import annotations

import sys

import onnx
from onnx import TensorProto, helper

SAMPLES, CONTEXT, STATE = 512, 64, (2, 128)
RATE_HZ = 16_000

_FLOAT, _BOOL, _INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def as_sequence_model(network: onnx.ModelProto) -> onnx.ModelProto:
    """The network with inputs AUDIO [B, 512], START [B, 1], STATE_IN [B, 2, 128] and CONTEXT_IN [B, 64], and outputs
    PROB [B, 1], STATE_OUT and CONTEXT_OUT. Where START is true, what came as state is not looked at.

    Nothing inside is renamed: the network's subgraphs refer to its outer names.
    """
    model = onnx.ModelProto()
    model.CopyFrom(network)
    graph = model.graph
    before = [
        # Where, and not a product with zero: memory that was never written may hold a NaN.
        helper.make_node("Where", ["START", "weir_zero", "CONTEXT_IN"], ["weir_context"]),
        helper.make_node("Concat", ["weir_context", "AUDIO"], ["input"], axis=1),
        helper.make_node("Unsqueeze", ["START", "weir_axis_2"], ["weir_start"]),
        helper.make_node("Where", ["weir_start", "weir_zero", "STATE_IN"], ["weir_state"]),
        helper.make_node("Transpose", ["weir_state"], ["state"], perm=[1, 0, 2]),
    ]
    after = [
        helper.make_node("Transpose", ["stateN"], ["STATE_OUT"], perm=[1, 0, 2]),
        helper.make_node("Slice", ["AUDIO", "weir_tail", "weir_end", "weir_axis_1"], ["CONTEXT_OUT"]),
        helper.make_node("Identity", ["output"], ["PROB"]),
    ]
    constants = [
        helper.make_tensor("sr", _INT64, [], [RATE_HZ]),
        helper.make_tensor("weir_zero", _FLOAT, [], [0.0]),
        helper.make_tensor("weir_axis_1", _INT64, [1], [1]),
        helper.make_tensor("weir_axis_2", _INT64, [1], [2]),
        helper.make_tensor("weir_tail", _INT64, [1], [SAMPLES - CONTEXT]),
        helper.make_tensor("weir_end", _INT64, [1], [sys.maxsize]),
    ]
    inputs = [
        helper.make_tensor_value_info("AUDIO", _FLOAT, ["batch", SAMPLES]),
        helper.make_tensor_value_info("START", _BOOL, ["batch", 1]),
        helper.make_tensor_value_info("STATE_IN", _FLOAT, ["batch", *STATE]),
        helper.make_tensor_value_info("CONTEXT_IN", _FLOAT, ["batch", CONTEXT]),
    ]
    outputs = [
        helper.make_tensor_value_info("PROB", _FLOAT, ["batch", 1]),
        helper.make_tensor_value_info("STATE_OUT", _FLOAT, ["batch", *STATE]),
        helper.make_tensor_value_info("CONTEXT_OUT", _FLOAT, ["batch", CONTEXT]),
    ]
    nodes = [*before, *network.graph.node, *after]
    for field, new in (("node", nodes), ("input", inputs), ("output", outputs)):
        del getattr(graph, field)[:]
        getattr(graph, field).extend(new)
    graph.initializer.extend(constants)
    onnx.checker.check_model(model)
    return model
