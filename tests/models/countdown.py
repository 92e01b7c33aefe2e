"""An iterative model: counts down from its input, one number an execution, and answers how it was run.

A decoupled one sends a response each time, the other a single one at the end. With `sleep_s` among its parameters each
execution takes that long. `RUNS` are the flags of its executions, `SEQUENCE` is its correlation id.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

RESCHEDULE = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        parameters = config.get("parameters", {})
        self.sleep_s = float(parameters.get("sleep_s", {}).get("string_value", 0))
        self.answers_all = "answers_all" in parameters
        self.left = {}
        self.runs = {}

    def execute(self, requests):
        time.sleep(self.sleep_s)
        responses = []
        for request in requests:
            sequence, flags = request.correlation_id(), request.flags()
            first = int(pb_utils.get_input_tensor_by_name(request, "FROM").as_numpy().ravel()[0])
            if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START or sequence not in self.left:
                self.left[sequence], self.runs[sequence] = first, []
            self.left[sequence] -= 1
            self.runs[sequence].append(flags)
            response = pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("LEFT", np.array([[self.left[sequence]]], np.int32)),
                    pb_utils.Tensor("RUNS", np.array([[",".join(map(str, self.runs[sequence])).encode()]], np.object_)),
                    pb_utils.Tensor("SEQUENCE", np.array([[str(sequence).encode()]], np.object_)),
                ]
            )
            again = self.left[sequence] > 0
            if again:
                request.set_release_flags(RESCHEDULE)
            if self.decoupled:
                request.get_response_sender().send(response, flags=0 if again else FINAL)
            responses.append(None if again and not self.answers_all else response)
        return None if self.decoupled else responses
