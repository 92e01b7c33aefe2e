"""Stateful ONNX models: accumulators whose sums are implicit states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper

from tests.support.models.zoo import config_text, write_graph, write_model

SUM = 'state [{ input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [1] %s }]'
START = 'control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }] }]'


def write_accumulator(
    root: Path,
    name: str,
    strategy: str = "direct { }",
    initial: str = "initial_state: { name: 'zero' data_type: TYPE_FP32 dims: [1] zero_data: true }",
    batch: int = 4,
    instances: int = 1,
    idle_us: int = 60_000_000,
    more: str = "",
) -> Path:
    """`OUT` is the sum of all that the sequence has sent, `STARTED` its START control; the sum is the state."""
    batching = f"{strategy} max_sequence_idle_microseconds: {idle_us} {START} {SUM % initial}"
    tail = f"sequence_batching {{ {batching} }}\ninstance_group [{{ count: {instances} kind: KIND_CPU }}]\n{more}"
    inputs, outputs = {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1]), "STARTED": ("FP32", [1])}
    folder = write_model(root, name, config_text(name, "onnxruntime", inputs, outputs, batch, tail))
    dims = [-1, 1] if batch else [1]
    write_graph(
        folder / "1" / "model.onnx",
        [
            helper.make_node("Add", ["IN", "SUM_IN"], ["SUM_OUT"]),
            helper.make_node("Identity", ["SUM_OUT"], ["OUT"]),
            helper.make_node("Identity", ["START"], ["STARTED"]),
        ],
        {"IN": ("FP32", dims), "SUM_IN": ("FP32", dims), "START": ("FP32", dims)},
        {"OUT": ("FP32", dims), "STARTED": ("FP32", dims), "SUM_OUT": ("FP32", dims)},
    )
    return folder


def write_checkpointed(root: Path, name: str, every: int, **options: object) -> Path:
    """The accumulator, whose states are checkpointed after every so many requests of a sequence."""
    parameter = f'parameters {{ key: "weir_checkpoint_every" value {{ string_value: "{every}" }} }}'
    return write_accumulator(root, name, more=parameter, **options)  # type: ignore[arg-type]


def write_history(root: Path, name: str) -> Path:
    """`OUT` is all that the sequence has sent, in order: a state that grows, declared as an output too."""
    state = 'state [{ input_name: "PAST" output_name: "OUT" data_type: TYPE_INT32 dims: [-1] '
    state += 'initial_state: { name: "first" data_type: TYPE_INT32 dims: [2] data_file: "first.bin" } }]'
    batching = f"sequence_batching {{ oldest {{ max_candidate_sequences: 8 }} {state} }}"
    tensors = {"IN": ("INT32", [1])}, {"OUT": ("INT32", [-1])}
    folder = write_model(root, name, config_text(name, "onnxruntime", *tensors, 4, batching))
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "first.bin").write_bytes(np.array([7, 8], np.int32).tobytes())
    write_graph(
        folder / "1" / "model.onnx",
        [helper.make_node("Concat", ["PAST", "IN"], ["OUT"], axis=1)],
        {"IN": ("INT32", [-1, 1]), "PAST": ("INT32", [-1, -1])},
        {"OUT": ("INT32", [-1, -1])},
    )
    return folder
