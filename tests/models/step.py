"""A step of ensembles: OUT is IN with 1 added, TOLD is what came with the request; IN's first element may ask for more.

FAIL answers an error, RAISE raises, LACK leaves OUT away, MARK sends sequence parameters with the response. In a decoupled
model there are as many responses as IN says, each with its number.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FAIL, RAISE, LACK, MARK = 1001, 1003, 1005, 1007


class TritonPythonModel:
    def initialize(self, args):
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        self.is_decoupled = policy.get("decoupled", False)

    def execute(self, requests):
        if self.is_decoupled:
            for request in requests:
                self.repeat(request)
            return None
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        first = given.flat[0]
        if first == RAISE:
            raise ValueError("asked to raise")
        if first == FAIL:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("asked to fail"))
        told = {
            "id": request.request_id(),
            "sequence": [request.correlation_id(), request.flags()],
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
            "extra": pb_utils.get_input_tensor_by_name(request, "EXTRA") is not None,
        }
        text = np.full((len(given), 1), json.dumps(told).encode(), np.object_)
        outputs = [pb_utils.Tensor("OUT", given + 1), pb_utils.Tensor("TOLD", text)]
        if first == LACK:
            outputs = outputs[1:]
        marks = (
            {"sequence_id": 77, "sequence_start": False, "sequence_end": True, "other": "x"} if first == MARK else {}
        )
        return pb_utils.InferenceResponse(outputs, parameters=marks)

    def repeat(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        sender = request.get_response_sender()
        for number in range(given.flat[0]):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full_like(given, number))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
