"""Takes as long as the slowest request of its batch asks for (`DELAY_MS`), then answers each with its `VALUE`.

`BATCH` tells each request how many requests ran with it.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        delays = [pb_utils.get_input_tensor_by_name(request, "DELAY_MS").as_numpy().max() for request in requests]
        time.sleep(float(max(delays)) / 1000)
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            batch = np.full((len(value), 1), len(requests), dtype=np.int32)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("VALUE_OUT", value), pb_utils.Tensor("BATCH", batch)])
            )
        return responses
