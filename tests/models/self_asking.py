"""Answers `OUT` with `IN` plus one; what is below zero it asks itself for, without the sign."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()) for request in requests]

    def answer(self, value):
        if value[0] >= 0:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value + 1)])
        inputs = [pb_utils.Tensor("IN", np.abs(value))]
        return pb_utils.InferenceRequest(model_name="asking", inputs=inputs, requested_output_names=["OUT"]).exec()
