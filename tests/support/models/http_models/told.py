"""Returns the contents of its request as JSON; the response has parameters of each type."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        reply = {
            "id": request.request_id(),
            "parameters": json.loads(request.parameters()),
            "outputs": sorted(request.requested_output_names()),
            "inputs": {tensor.name(): list(tensor.as_numpy().shape) for tensor in request.inputs()},
        }
        text = np.array([json.dumps(reply, sort_keys=True).encode()], dtype=np.object_).reshape([1, 1])
        parameters = {"text": "a", "number": 7, "flag": True}
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text)], parameters=parameters)
