"""Answers with its input, and in `RUN` the number of the answer: who sees it again got an answer that was kept.

A request whose first element is negative fails. `DELAY_MS`, where it is given, is waited before.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.runs = 0

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        delay = pb_utils.get_input_tensor_by_name(request, "DELAY_MS")
        if delay is not None:
            time.sleep(float(delay.as_numpy().max()) / 1000)
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if values.ravel()[0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("a negative number"))
        self.runs += 1
        run = np.full((len(values), 1), self.runs, np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values), pb_utils.Tensor("RUN", run)])
