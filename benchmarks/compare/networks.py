"""The networks that both servers run: random weights from a fixed seed, written in ONNX's own text format.

They range from no work at all to mostly work, because a server's cost is the remainder after the model's cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import numpy_helper

MAX_BATCH_SIZE = 32
_OPSET, _IR = 17, 8
_VOCABULARY = 2000


class Graph:
    """Nodes as lines of ONNX text, and their weights; `X` is the input."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(7)

    def constant(self, values: np.ndarray) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def weight(self, *shape: int, scale: float) -> str:
        return self.constant(self._random.standard_normal(shape, dtype=np.float32) * np.float32(scale))

    def node(self, expression: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        weight, bias = self.weight(inputs, outputs, scale=(2 / inputs) ** 0.5), self.weight(outputs, scale=0.01)
        return self.node(f"Add({self.node(f'MatMul({x}, {weight})')}, {bias})")

    def convolution(self, x: str, inputs: int, outputs: int, size: int, stride: int) -> str:
        weight = self.weight(outputs, inputs, size, size, scale=(2 / (inputs * size * size)) ** 0.5)
        bias, pad = self.weight(outputs, scale=0.01), size // 2
        attributes = f"kernel_shape=[{size},{size}], strides=[{stride},{stride}], pads=[{pad},{pad},{pad},{pad}]"
        return self.node(f"Conv<{attributes}>({x}, {weight}, {bias})")

    def layer_normalization(self, x: str, width: int) -> str:
        gain, bias = self.constant(np.ones(width, np.float32)), self.constant(np.zeros(width, np.float32))
        return self.node(f"LayerNormalization<axis=-1>({x}, {gain}, {bias})")

    def model(self, inputs: str, outputs: str, y: str) -> onnx.ModelProto:
        """The checked model, from what the input and the output look like and which node is the output."""
        body = "\n".join([*self.lines, f"Y = Identity({y})"])
        text = f'<ir_version: {_IR}, opset_import: ["" : {_OPSET}]> network ({inputs}) => ({outputs}) {{ {body} }}'
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(self.weights)
        onnx.checker.check_model(model)
        return model


def _identity() -> onnx.ModelProto:
    return Graph().model("float[b,16] X", "float[b,16] Y", "X")


def _mlp() -> onnx.ModelProto:
    graph = Graph()
    x = graph.node(f"Relu({graph.dense('X', 784, 512)})")
    x = graph.node(f"Relu({graph.dense(x, 512, 512)})")
    return graph.model("float[b,784] X", "float[b,10] Y", graph.dense(x, 512, 10))


def _cnn() -> onnx.ModelProto:
    """Eight residual blocks, about 0.4 GFLOP an image."""
    graph = Graph()
    x = graph.node(f"Relu({graph.convolution('X', 3, 24, 7, 2)})")
    x = graph.node(f"MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>({x})")
    width = 24
    for outputs, stride in ((24, 1), (24, 1), (48, 2), (48, 1), (96, 2), (96, 1), (192, 2), (192, 1)):
        y = graph.node(f"Relu({graph.convolution(x, width, outputs, 3, stride)})")
        y = graph.convolution(y, outputs, outputs, 3, 1)
        if width != outputs:
            x = graph.convolution(x, width, outputs, 1, stride)
        x, width = graph.node(f"Relu({graph.node(f'Add({x}, {y})')})"), outputs
    x = graph.node(f"Flatten<axis=1>({graph.node(f'GlobalAveragePool({x})')})")
    return graph.model("float[b,3,224,224] X", "float[b,100] Y", graph.dense(x, width, 100))


def _bert_tiny(width: int = 128, heads: int = 2) -> onnx.ModelProto:
    """Two transformer layers over token ids; the sequence's length is free."""
    graph = Graph()
    x = graph.node(f"Gather({graph.weight(_VOCABULARY, width, scale=0.5)}, X)")
    split = graph.constant(np.array([0, 0, heads, width // heads]))
    joined = graph.constant(np.array([0, 0, width]))
    scale = graph.constant(np.float32((width // heads) ** -0.5))
    for _ in range(2):
        q, k, v = (graph.node(f"Reshape({graph.dense(x, width, width)}, {split})") for _ in range(3))
        q, v = (graph.node(f"Transpose<perm=[0,2,1,3]>({part})") for part in (q, v))
        k = graph.node(f"Transpose<perm=[0,2,3,1]>({k})")
        scores = graph.node(f"Mul({graph.node(f'MatMul({q}, {k})')}, {scale})")
        mixed = graph.node(f"MatMul({graph.node(f'Softmax<axis=-1>({scores})')}, {v})")
        mixed = graph.node(f"Reshape({graph.node(f'Transpose<perm=[0,2,1,3]>({mixed})')}, {joined})")
        x = graph.layer_normalization(graph.node(f"Add({x}, {graph.dense(mixed, width, width)})"), width)
        hidden = graph.node(f"Relu({graph.dense(x, width, 4 * width)})")
        x = graph.layer_normalization(graph.node(f"Add({x}, {graph.dense(hidden, 4 * width, width)})"), width)
    pooled = graph.node(f"ReduceMean<axes=[1], keepdims=0>({x})")
    return graph.model("int64[b,s] X", "float[b,2] Y", graph.dense(pooled, width, 2))


@dataclass(frozen=True)
class Network:
    """One of them: its input `X` and output `Y` without the batch axis; `length` is what a request has for a -1."""

    name: str
    build: Callable[[], onnx.ModelProto]
    input_dims: tuple[int, ...]
    output_dims: tuple[int, ...]
    datatype: str = "FP32"
    length: int = 64

    def sample(self, seed: int) -> np.ndarray:
        """The input of one request."""
        random, shape = np.random.default_rng(seed), (1, *(self.length if dim < 0 else dim for dim in self.input_dims))
        if self.datatype == "INT64":
            return random.integers(0, _VOCABULARY, shape, dtype=np.int64)
        return random.standard_normal(shape, dtype=np.float32)

    def config(self, backend: str) -> str:
        """`config.pbtxt`: one instance on the CPU, dynamic batching without a delay."""
        return f"""name: "{self.name}"
backend: "{backend}"
max_batch_size: {MAX_BATCH_SIZE}
input [ {{ name: "X" data_type: TYPE_{self.datatype} dims: {list(self.input_dims)} }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: {list(self.output_dims)} }} ]
dynamic_batching {{ }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""

    def write(self, repository: Path, backend: str) -> Path:
        """Writes the model into `repository`; returns the folder of its version."""
        version = repository / self.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(self.config(backend))
        onnx.save(self.build(), str(version / "model.onnx"))
        return version

    @cached_property
    def session(self) -> onnxruntime.InferenceSession:
        """ONNX Runtime without a server: what answers are compared with, and what a server can't be cheaper than."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        return onnxruntime.InferenceSession(
            self.build().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, x: np.ndarray) -> np.ndarray:
        """The right answer."""
        return self.session.run(None, {"X": x})[0]


NETWORKS = {
    network.name: network
    for network in (
        Network("identity_fp32", _identity, (16,), (16,)),
        Network("mlp", _mlp, (784,), (10,)),
        Network("cnn", _cnn, (3, 224, 224), (100,)),
        Network("bert_tiny", _bert_tiny, (-1,), (2,), "INT64"),
    )
}
