"""The models of Triton's published client examples: small ones with the same names, tensors and outputs."""

from __future__ import annotations

from pathlib import Path

from onnx import helper

from tests.support.models.zoo import ONNX_TYPES, Tensors, config_text, write_graph, write_model, write_python_model

VALUES = [11, 7, 5, 3, 2, 0, 1]
"""What the sequence examples send after each sequence's first value."""

IMAGE_SIDE = 299
COLOURS = ["red", "green", "blue"]
"""The classes of `densenet_onnx`."""


def _control(name: str, kind: str, values: str) -> str:
    return f'{{ name: "{name}" control [{{ kind: CONTROL_SEQUENCE_{kind} {values} }}] }}'


_START = _control("START", "START", "int32_false_true: [0, 1]")
_END = _control("END", "END", "int32_false_true: [0, 1]")
_READY = _control("READY", "READY", "int32_false_true: [0, 1]")


def _sequence_batching(strategy: str, *controls: str) -> str:
    inputs = ", ".join(controls)
    return f"sequence_batching {{ max_sequence_idle_microseconds: 10000000 {strategy} control_input [{inputs}] }}"


def write_examples(root: Path) -> None:
    """A repository of all the examples' models."""
    for name, datatype in (("simple", "INT32"), ("simple_int8", "INT8"), ("simple_string", "BYTES")):
        _write_sums(root, name, datatype)
    _write_identity(root)
    _write_sequences(root)
    _write_image_classes(root)
    write_python_model(
        root,
        "repeat_int32",
        "repeat",
        {"IN": ("INT32", [-1]), "DELAY": ("UINT32", [-1]), "WAIT": ("UINT32", [1])},
        {"OUT": ("INT32", [1]), "IDX": ("UINT32", [1])},
        more="model_transaction_policy { decoupled: true }",
    )


def _write_sums(root: Path, name: str, datatype: str) -> None:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, of decimal numbers where the datatype is BYTES."""
    inputs: Tensors = {"INPUT0": (datatype, [16]), "INPUT1": (datatype, [16])}
    outputs: Tensors = {"OUTPUT0": (datatype, [16]), "OUTPUT1": (datatype, [16])}
    folder = write_model(root, name, config_text(name, "onnxruntime", inputs, outputs, 8))
    number, own = ONNX_TYPES["INT32"], ONNX_TYPES[datatype]
    nodes = [
        helper.make_node("Cast", ["INPUT0"], ["a"], to=number),
        helper.make_node("Cast", ["INPUT1"], ["b"], to=number),
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Sub", ["a", "b"], ["difference"]),
        helper.make_node("Cast", ["sum"], ["OUTPUT0"], to=own),
        helper.make_node("Cast", ["difference"], ["OUTPUT1"], to=own),
    ]
    write_graph(folder / "1" / "model.onnx", nodes, _batched(inputs), _batched(outputs))


def _write_identity(root: Path) -> None:
    inputs: Tensors = {"INPUT0": ("BYTES", [-1])}
    outputs: Tensors = {"OUTPUT0": ("BYTES", [-1])}
    folder = write_model(root, "simple_identity", config_text("simple_identity", "onnxruntime", inputs, outputs, 8))
    node = helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])
    write_graph(folder / "1" / "model.onnx", [node], _batched(inputs), _batched(outputs))


def _write_sequences(root: Path) -> None:
    """Each answers its input, one more at the start; the dynamic ones add the correlation id at the end.

    Those asked with numbers for correlation ids keep no state; the one asked with strings adds up its inputs.
    """
    value: Tensors = {"INPUT": ("INT32", [1])}
    answer: Tensors = {"OUTPUT": ("INT32", [1])}
    controls: Tensors = {"START": ("INT32", [1]), "READY": ("INT32", [1])}

    batching = _sequence_batching("", _START, _READY)
    folder = write_model(
        root, "simple_sequence", config_text("simple_sequence", "onnxruntime", value, answer, 8, batching)
    )
    nodes = [helper.make_node("Add", ["INPUT", "START"], ["OUTPUT"])]
    write_graph(folder / "1" / "model.onnx", nodes, _batched(value | controls), _batched(answer))

    name = "simple_dyna_sequence"
    oldest = "oldest { max_candidate_sequences: 1024 max_queue_delay_microseconds: 10000 }"
    numbered = _control("CORRID", "CORRID", "data_type: TYPE_UINT64")
    batching = _sequence_batching(oldest, _START, _END, _READY, numbered)
    folder = write_model(root, name, config_text(name, "onnxruntime", value, answer, 8, batching))
    controls = {**controls, "END": ("INT32", [1]), "CORRID": ("UINT64", [1])}
    nodes = [
        helper.make_node("Cast", ["CORRID"], ["id"], to=ONNX_TYPES["INT32"]),
        helper.make_node("Mul", ["END", "id"], ["id_at_end"]),
        helper.make_node("Add", ["INPUT", "START"], ["first"]),
        helper.make_node("Add", ["first", "id_at_end"], ["OUTPUT"]),
    ]
    write_graph(folder / "1" / "model.onnx", nodes, _batched(value | controls), _batched(answer))

    named = _control("CORRID", "CORRID", "data_type: TYPE_STRING")
    batching = _sequence_batching(oldest, _START, _END, _READY, named)
    write_python_model(root, "simple_string_dyna_sequence", "named_total", value, answer, 8, batching)


def _write_image_classes(root: Path) -> None:
    """An image's mean colour as the scores of three classes."""
    name, output = "densenet_onnx", "InceptionV3/Predictions/Softmax"
    config = f"""
name: "{name}"
backend: "onnxruntime"
max_batch_size: 8
input {{ name: "input" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [{IMAGE_SIDE}, {IMAGE_SIDE}, 3] }}
output {{ name: "{output}" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }}
"""
    folder = write_model(root, name, config)
    (folder / "labels.txt").write_text("\n".join(COLOURS) + "\n")
    node = helper.make_node("ReduceMean", ["input"], [output], axes=[1, 2], keepdims=0)
    inputs: Tensors = {"input": ("FP32", [-1, IMAGE_SIDE, IMAGE_SIDE, 3])}
    write_graph(folder / "1" / "model.onnx", [node], inputs, {output: ("FP32", [-1, 3])})


def _batched(tensors: Tensors) -> Tensors:
    return {name: (datatype, [-1, *dims]) for name, (datatype, dims) in tensors.items()}
