"""Linear models: `Y = X @ weights + bias`, both read from `weights.npz` in the version's folder."""

import numpy as np

from weir.backend import ArrayBackend, ArrayFunction, DescribedModel, DescribedTensor, ModelVersion


class Backend(ArrayBackend):
    formats = ("weights.npz",)

    def open(self, model: ModelVersion) -> ArrayFunction:
        weights, bias = read_weights(model)
        return lambda inputs: {"Y": inputs["X"] @ weights + bias}

    def describe(self, model: ModelVersion) -> DescribedModel:
        weights, _ = read_weights(model)
        features, targets = weights.shape
        return DescribedModel(
            inputs=[DescribedTensor("X", "TYPE_FP32", [-1, features])],
            outputs=[DescribedTensor("Y", "TYPE_FP32", [-1, targets])],
        )


def read_weights(model: ModelVersion) -> tuple[np.ndarray, np.ndarray]:
    with np.load(model.directory / "weights.npz") as saved:
        return saved["weights"].astype(np.float32), saved["bias"].astype(np.float32)
