"""A stateful model whose correlation ids are decimal numbers as text: adds up, and adds the id at the end."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(request)]) for request in requests]

    def answer(self, request):
        value, start, end, name = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]
            for name in ("INPUT", "START", "END", "CORRID")
        )
        total = int(value) + (0 if start else self.totals[name])
        self.totals[name] = total
        if end:
            del self.totals[name]
            total += int(name)
        return pb_utils.Tensor("OUTPUT", np.array([[total]], np.int32))
