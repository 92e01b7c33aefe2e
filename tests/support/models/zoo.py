"""Model repositories for tests: small generated ONNX graphs, and the Python models of `tests/models`."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
from onnx import TensorProto, helper

SOURCES = Path(__file__).parents[2] / "models"

ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
"""BF16 is missing: ONNX Runtime's Python interface has no arrays of it."""

Tensors = dict[str, tuple[str, list[int]]]
"""Tensors of a configuration by name: (datatype, dims)."""

LABELS = ["ant", "bee", "cat", "dog", "eel"]

_BATCH = ["batch"]


def config_text(name: str, backend: str, inputs: Tensors, outputs: Tensors, batch: int = 0, more: str = "") -> str:
    """A `config.pbtxt`; `more` is appended."""
    return "\n".join(
        [
            f'name: "{name}"',
            f'backend: "{backend}"',
            f"max_batch_size: {batch}",
            *(f"input {_tensor(*entry)}" for entry in inputs.items()),
            *(f"output {_tensor(*entry)}" for entry in outputs.items()),
            more,
        ]
    )


def _tensor(name: str, described: tuple[str, list[int]]) -> str:
    datatype, dims = described
    return f'{{ name: "{name}" data_type: TYPE_{"STRING" if datatype == "BYTES" else datatype} dims: {dims} }}'


def write_model(root: Path, name: str, config: str | None) -> Path:
    """The folder of model `name` with this configuration, and an empty version 1."""
    (root / name / "1").mkdir(parents=True)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    return root / name


def write_python_model(
    root: Path, name: str, source: str, inputs: Tensors, outputs: Tensors, batch: int = 0, more: str = ""
) -> Path:
    """A Python model that runs `tests/models/<source>.py`."""
    folder = write_model(root, name, config_text(name, "python", inputs, outputs, batch, more))
    shutil.copy(SOURCES / f"{source}.py", folder / "1" / "model.py")
    return folder


def write_graph(path: Path, nodes: list[onnx.NodeProto], inputs: Tensors, outputs: Tensors, **constants: float) -> None:
    """An ONNX file; a dimension of -1 is a variable one, `constants` are FP32 scalars."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [_value(name, *described) for name, described in inputs.items()],
        [_value(name, *described) for name, described in outputs.items()],
        [helper.make_tensor(name, TensorProto.FLOAT, [], [value]) for name, value in constants.items()],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _value(name: str, datatype: str, dims: list[int]) -> onnx.ValueInfoProto:
    shape = [f"{name}_{position}" if dim == -1 else dim for position, dim in enumerate(dims)]
    return helper.make_tensor_value_info(name, ONNX_TYPES[datatype], shape)


def write_identity(root: Path, name: str, datatype: str, more: str = "", instances: int = 1) -> Path:
    """An ONNX model of one variable dimension whose `OUT` is its `IN`, in batches of up to 8."""
    group = f"instance_group [{{ count: {instances} kind: KIND_CPU }}]\n{more}"
    tensors = {"IN": (datatype, [-1])}, {"OUT": (datatype, [-1])}
    folder = write_model(root, name, config_text(name, "onnxruntime", *tensors, 8, group))
    node = helper.make_node("Identity", ["IN"], ["OUT"])
    write_graph(folder / "1" / "model.onnx", [node], {"IN": (datatype, [-1, -1])}, {"OUT": (datatype, [-1, -1])})
    return folder


def write_slow(root: Path, name: str = "slow", more: str = "dynamic_batching { }") -> Path:
    """A Python model that takes the time it is asked to take, in batches of up to 8."""
    return write_python_model(
        root,
        name,
        "slow",
        {"VALUE": ("INT64", [1]), "DELAY_MS": ("FP32", [1])},
        {"VALUE_OUT": ("INT64", [1]), "BATCH": ("INT32", [1])},
        8,
        more,
    )


def write_versions(root: Path, name: str, policy: str) -> Path:
    """An ONNX model with versions 1 to 3, each of which adds its own number."""
    config = config_text(name, "onnxruntime", {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}, 0, policy)
    folder = write_model(root, name, config)
    node = helper.make_node("Add", ["IN", "NUMBER"], ["OUT"])
    for version in (1, 2, 3):
        path = folder / str(version) / "model.onnx"
        write_graph(path, [node], {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}, NUMBER=float(version))
    return folder


def write_zoo(root: Path) -> None:
    """A repository with one model for each thing that a healthy server can be asked."""
    for datatype in ONNX_TYPES:
        write_identity(root, f"identity_{datatype}", datatype, "dynamic_batching { }")
    bf16 = {"IN": ("BF16", [-1])}, {"IN_OUT": ("BF16", [-1])}
    write_python_model(root, "identity_BF16", "identity", *bf16, 8)
    write_add_sub(root)
    write_shapes(root)
    write_classes(root)
    write_versions(root, "all_versions", "version_policy { all { } }")
    write_versions(root, "some_versions", "version_policy { specific { versions: [1, 3] } }")
    write_versions(root, "latest_version", "")
    reply = {"TOLD": ("BYTES", [1])}
    write_python_model(root, "echo", "echo", {"ANY": ("FP32", [1])}, reply, 4)
    write_slow(root)
    write_slow(root, "slow_alone", "")
    write_faulty(root)


def write_small_zoo(root: Path) -> None:
    """A repository that starts fast: identities that batch, a slow model, and one that fails as it is told."""
    write_identity(root, "identity_FP32", "FP32", "dynamic_batching { }")
    write_identity(root, "fast", "INT64", "dynamic_batching { }")
    write_slow(root)
    write_faulty(root)


def write_faulty(root: Path) -> None:
    """A Python model that fails as it is told."""
    write_python_model(root, "faulty", "faulty", {"WHAT": ("BYTES", [1])}, {"SAID": ("BYTES", [1])}, 4)


def write_streamer(root: Path, name: str, more: str, decoupled: bool = True) -> Path:
    """A Python model that sends the responses it is asked to send, in batches of up to 8."""
    policy = f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}"
    outputs: Tensors = {"NUMBER": ("INT32", [1]), "CONTENT": ("UINT8", [-1])}
    return write_python_model(root, name, "streamer", {"PLAN": ("BYTES", [1])}, outputs, 8, f"{policy}\n{more}")


def write_add_sub(root: Path) -> None:
    inputs: Tensors = {"A": ("INT32", [4]), "B": ("INT32", [4])}
    outputs: Tensors = {"SUM": ("INT32", [4]), "DIFFERENCE": ("INT32", [4])}
    folder = write_model(root, "add_sub", config_text("add_sub", "onnxruntime", inputs, outputs, 8))
    nodes = [
        helper.make_node("Add", ["A", "B"], ["SUM"]),
        helper.make_node("Sub", ["A", "B"], ["DIFFERENCE"]),
    ]
    batched = [{name: (datatype, [-1, *dims]) for name, (datatype, dims) in t.items()} for t in (inputs, outputs)]
    write_graph(folder / "1" / "model.onnx", nodes, *batched)


def write_shapes(root: Path) -> None:
    node = helper.make_node("Neg", ["IN"], ["OUT"])
    # Without a configuration: all of it is told by the graph.
    folder = write_model(root, "bare", None)
    write_graph(folder / "1" / "model.onnx", [node], {"IN": ("FP32", [-1, 3])}, {"OUT": ("FP32", [-1, 3])})
    tensors = {"IN": ("FP32", [-1, -1])}, {"OUT": ("FP32", [-1, -1])}
    folder = write_model(root, "grid", config_text("grid", "onnxruntime", *tensors))
    write_graph(folder / "1" / "model.onnx", [node], *tensors)
    reshaped = """
name: "reshaped"
backend: "onnxruntime"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [2, 3] reshape { shape: [6] } }
output { name: "OUT" data_type: TYPE_FP32 dims: [3, 2] reshape { shape: [6] } }
"""
    folder = write_model(root, "reshaped", reshaped)
    write_graph(folder / "1" / "model.onnx", [node], {"IN": ("FP32", [-1, 6])}, {"OUT": ("FP32", [-1, 6])})


def write_classes(root: Path) -> None:
    config = """
name: "classes"
backend: "onnxruntime"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [5] }
output { name: "OUT" data_type: TYPE_FP32 dims: [5] label_filename: "labels.txt" }
"""
    folder = write_model(root, "classes", config)
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    node = helper.make_node("Identity", ["IN"], ["OUT"])
    write_graph(folder / "1" / "model.onnx", [node], {"IN": ("FP32", [-1, 5])}, {"OUT": ("FP32", [-1, 5])})
