"""Answers UNAVAILABLE as often as its input `FAILURES` says, counted by the id, then how often it was asked."""

from collections import Counter

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.asked = Counter()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        failures = pb_utils.get_input_tensor_by_name(request, "FAILURES").as_numpy()
        self.asked[request.request_id()] += 1
        asked = self.asked[request.request_id()]
        if asked <= int(failures.flat[0]):
            error = pb_utils.TritonError(f"not now, {asked}", pb_utils.TritonError.UNAVAILABLE)
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ASKED", np.full(failures.shape, asked, np.int64))])
