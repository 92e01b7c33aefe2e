"""Nearest neighbours: the rows of `vectors.npy` most similar to a query, with CuPy on GPUs and with NumPy on CPUs.

Both libraries have the same functions, so there is one implementation. On a GPU the queries are in its memory already, and
the results go from there to the client; nothing of CuPy is imported before an instance on a GPU exists.
"""

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from weir.backend import DescribedModel, DescribedTensor, Device, InstanceBackend, ModelVersion

COUNT = 3
"""Neighbours of each query."""


class Backend(InstanceBackend):
    kinds = ("KIND_CPU", "KIND_GPU")
    formats = ("vectors.npy",)
    requires_on_gpus = ("cupy",)

    def setup(self, model: ModelVersion, device: Device) -> None:
        self.arrays = importlib.import_module("cupy") if device.is_gpu else np
        # CuPy's work, and the memory that it allocates for it, belong on the instance's stream.
        self.stream = self.arrays.cuda.ExternalStream(device.stream) if device.is_gpu else contextlib.nullcontext()
        with self.stream:
            self.vectors = self.normal(self.arrays.asarray(read_vectors(model)))

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        with self.stream:
            scores = self.normal(self.arrays.asarray(inputs["QUERY"])) @ self.vectors.T
            order = self.arrays.argsort(-scores, axis=1)[:, :COUNT]
            return {"INDEX": order.astype(np.int64), "SCORE": self.arrays.take_along_axis(scores, order, axis=1)}

    def normal(self, rows: Any) -> Any:
        """The rows with length 1."""
        return rows / self.arrays.sqrt((rows * rows).sum(axis=1, keepdims=True))

    def describe(self, model: ModelVersion) -> DescribedModel:
        return DescribedModel(
            inputs=[DescribedTensor("QUERY", "TYPE_FP32", [-1, read_vectors(model).shape[1]])],
            outputs=[
                DescribedTensor("INDEX", "TYPE_INT64", [-1, COUNT]),
                DescribedTensor("SCORE", "TYPE_FP32", [-1, COUNT]),
            ],
        )


def read_vectors(model: ModelVersion) -> np.ndarray:
    vectors: np.ndarray = np.load(model.directory / "vectors.npy").astype(np.float32)
    return vectors
