"""A stateful model: answers the sum of what its sequence has sent, and which instance holds it.

It keeps the sums by correlation id, or by row of the batch where it isn't told the id.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


def control(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().ravel()[0]


class TritonPythonModel:
    def initialize(self, args):
        self.instance = args["model_instance_name"].encode()
        self.sums = {}

    def execute(self, requests):
        responses = []
        for row, request in enumerate(requests):
            value = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().ravel()[0])
            sequence = control(request, "CORRID")
            place = row if sequence is None else sequence
            if control(request, "READY"):
                self.sums[place] = value if control(request, "START") else self.sums[place] + value
            outputs = [
                pb_utils.Tensor("OUTPUT", np.array([[self.sums.get(place, 0)]], np.int32)),
                pb_utils.Tensor("INSTANCE", np.array([[self.instance]], np.object_)),
            ]
            if control(request, "END"):
                del self.sums[place]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
