"""Triton's side: a Python model that calls ONNX Runtime with one thread, as Weir's worker does.

It is copied as `model.py` beside each `model.onnx`; it runs in Triton's own environment and imports nothing of Weir.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        batch = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        outputs = self.session.run(None, {"X": batch})[0]
        ends = np.cumsum([len(x) for x in inputs])
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", outputs[end - len(x) : end])])
            for x, end in zip(inputs, ends, strict=True)
        ]
