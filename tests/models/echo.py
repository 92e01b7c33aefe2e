"""Tells each request what came with it: id, parameters and requested outputs as JSON, parameters as parameters too."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            parameters = json.loads(request.parameters())
            told = {
                "id": request.request_id(),
                "parameters": parameters,
                "outputs": sorted(request.requested_output_names()),
            }
            text = np.array([[json.dumps(told).encode()]], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text)], parameters=parameters))
        return responses
