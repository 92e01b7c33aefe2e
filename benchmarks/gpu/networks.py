"""The networks of the GPU benchmarks, with random weights: files for each backend, and inputs for a batch.

They have the sizes and shapes of ResNet-50, of a BERT-base encoder with 128 and 512 tokens, and of a detector like
RetinaNet with images of 640 pixels. On a CPU they are tiny.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.plan import Plan

FILES = {"pytorch": "model.pt", "onnxruntime": "model.onnx", "tensorrt": "model.plan"}

CONFIG = """
backend: "{backend}"
max_batch_size: {batch}
input [{{ name: "INPUT" data_type: {input_type} dims: {input_dims} }}]
output [{{ name: "OUTPUT" data_type: TYPE_FP32 dims: {output_dims} }}]
instance_group [{{ count: {count} kind: {kind} }}]
{more}
"""


@dataclass(frozen=True, slots=True)
class Network:
    """One network: `make` builds it with torch; a row of its input has `dims`, and one of its output `output_dims`."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    output_dims: tuple[int, ...]
    make: Callable[[], Any]

    def rows(self, batch: int) -> np.ndarray:
        """The input of a batch."""
        random = np.random.default_rng(7)
        if self.datatype == "INT64":
            return random.integers(0, 1000, (batch, *self.dims))
        return random.standard_normal((batch, *self.dims), np.float32)


def network(name: str, plan: Plan) -> Network:
    """The network of this name, in the size for the plan's device. Imports torch when it is built."""
    if name == "residual":
        image = plan.size(224, 32)
        return Network(name, "FP32", (3, image, image), (1000,), lambda: _residual(plan.size(64, 2)))
    if name == "detector":
        image, width = plan.size(640, 64), plan.size(64, 2)
        boxes = 9 * sum((image // stride) ** 2 for stride in (16, 32))
        return Network(name, "FP32", (3, image, image), (boxes, 84), lambda: _detector(width))
    tokens = plan.size(int(name.removeprefix("encoder")), 8)
    width, layers = plan.size(768, 16), plan.size(12, 2)
    return Network(name, "INT64", (tokens,), (width,), lambda: _encoder(tokens, width, layers))


def write_files(chosen: Network, folder: Path, backends: Mapping[str, str] | set[str], most: int) -> dict[str, Path]:
    """The network's file for each of these backends that can be written here; `most` is the largest batch."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    module, example = chosen.make().eval(), torch.from_numpy(chosen.rows(2))
    found: dict[str, Path] = {}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # both ways of writing are deprecated, and say so
        if "pytorch" in backends:
            found["pytorch"] = folder / FILES["pytorch"]
            torch.jit.freeze(torch.jit.trace(module, example)).save(str(found["pytorch"]))
        if {"onnxruntime", "tensorrt"} & set(backends):
            onnx = folder / FILES["onnxruntime"]
            names: dict[str, Any] = {"input_names": ["INPUT"], "output_names": ["OUTPUT"], "opset_version": 17}
            axes = {"INPUT": {0: "batch"}, "OUTPUT": {0: "batch"}}
            torch.onnx.export(module, (example,), str(onnx), dynamo=False, dynamic_axes=axes, **names)
            if "onnxruntime" in backends:
                found["onnxruntime"] = onnx
            if "tensorrt" in backends:
                found["tensorrt"] = _build_engine(onnx, chosen, most)
    return found


def write_model(root: Path, name: str, backend: str, file: Path, chosen: Network, **fields: Any) -> None:
    """A model folder in `root` with this file; `fields` are batch, count, kind and more of its configuration."""
    version = root / name / "1"
    version.mkdir(parents=True)
    (version / FILES[backend]).hardlink_to(file)
    given = {
        "backend": backend,
        "input_type": f"TYPE_{chosen.datatype}",
        "input_dims": list(chosen.dims),
        "output_dims": list(chosen.output_dims),
        "more": "",
        **fields,
    }
    (version.parent / "config.pbtxt").write_text(CONFIG.format(**given))


def _residual(width: int) -> Any:
    from benchmarks.gpu.residual_network import ResidualNetwork

    return ResidualNetwork(width)


def _encoder(tokens: int, width: int, layers: int) -> Any:
    import torch
    from torch import nn

    heads = max(1, width // 64)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(self.before_attention(x)).reshape(-1, tokens, 3, heads, width // heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.joined(mixed.transpose(1, 2).reshape(-1, tokens, width))
            return x + self.dense(self.before_dense(x))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(1000, width)
            self.places = nn.Parameter(torch.randn(tokens, width) / 10)
            self.layers = nn.Sequential(*[Layer() for _ in range(layers)])

        def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
            return self.layers(self.words(INPUT) + self.places).mean(1)

    return Encoder()


def _detector(width: int) -> Any:
    import torch
    from torch import nn

    from benchmarks.gpu.residual_network import CLASSES, ResidualNetwork

    assert CLASSES

    class Detector(nn.Module):
        """A backbone, and at two scales a head with 9 boxes of 84 numbers for each place."""

        def __init__(self) -> None:
            super().__init__()
            stages = list(ResidualNetwork(width).layers.children())[:-3]
            self.early, self.late = nn.Sequential(*stages[:-3]), nn.Sequential(*stages[-3:])
            self.heads = nn.ModuleList([self._head(16 * width), self._head(32 * width)])

        @staticmethod
        def _head(inputs: int) -> nn.Sequential:
            middle = inputs // 4
            return nn.Sequential(nn.Conv2d(inputs, middle, 3, 1, 1), nn.ReLU(), nn.Conv2d(middle, 9 * 84, 1))

        def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
            fine = self.early(INPUT)
            coarse = self.late(fine)
            boxes = [head(x) for head, x in zip(self.heads, (fine, coarse), strict=True)]
            return torch.cat([one.permute(0, 2, 3, 1).reshape(one.shape[0], -1, 84) for one in boxes], 1)

    return Detector()


def _build_engine(onnx: Path, chosen: Network, most: int) -> Path:
    import tensorrt as trt

    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    definition = builder.create_network(0)
    parser = trt.OnnxParser(definition, builder.logger)
    if not parser.parse(onnx.read_bytes()):
        raise RuntimeError(f"TensorRT rejects {onnx.name}: {parser.get_error(0)}")
    profile, settings = builder.create_optimization_profile(), builder.create_builder_config()
    profile.set_shape("INPUT", (1, *chosen.dims), (min(8, most), *chosen.dims), (most, *chosen.dims))
    settings.add_optimization_profile(profile)
    plan = builder.build_serialized_network(definition, settings)
    if plan is None:
        raise RuntimeError(f"TensorRT can't build an engine of {onnx.name}")
    target = onnx.with_name(FILES["tensorrt"])
    target.write_bytes(bytes(plan))
    return target
