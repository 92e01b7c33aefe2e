"""Takes DELAY_MS, writes down what it ran and when, and tells each request what came with it.

A line of the file that parameter `DIARY` names is JSON: instance, begin and end (ns), and each request's inputs, as
`<name><shape>` in order. Each request is told how many ran with it, and its own line.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._diary = parameters["DIARY"]["string_value"]
        self._delay_s = float(parameters.get("DELAY_MS", {}).get("string_value", "0")) / 1000
        self._name = args["model_instance_name"]
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        begin_ns = time.monotonic_ns()
        time.sleep(self._delay_s)
        told = [
            " ".join(sorted(f"{tensor.name()}{list(tensor.as_numpy().shape)}" for tensor in request.inputs()))
            for request in requests
        ]
        with open(self._diary, "a") as diary:
            diary.write(json.dumps([self._name, begin_ns, time.monotonic_ns(), told]) + "\n")
        responses = [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("TOLD", np.array([[f"{len(requests)}: {line}".encode()]], np.object_))]
            )
            for line in told
        ]
        if not self._decoupled:
            return responses
        for request, response in zip(requests, responses, strict=True):
            sender = request.get_response_sender()
            sender.send(response)
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
