"""`OnnxTrial` describes ONNX models, and runs them on the CPU to find out which dimensions are the batch."""

from __future__ import annotations

from weir.repository.completion import DescribedModel
from weir.worker.backend_api.interface import ModelVersion
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend
from weir.worker.backends.trial import tried


class OnnxTrial(OnnxRuntimeBackend):
    """As the ONNX Runtime backend, whose description it completes by running the model."""

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The inputs and outputs of the graph, with what runs of the model show if it can be run."""
        described = super().describe(model)
        return described if described is None else tried(OnnxRuntimeBackend(), model, described)
