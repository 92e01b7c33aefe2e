"""Decoupled: returns `text_input` `COUNT` times; then an error if it says "error"."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().reshape(-1)[0])
            sender = request.get_response_sender()
            for number in range(count):
                outputs = [
                    pb_utils.Tensor("text_output", text),
                    pb_utils.Tensor("number", np.array([number], np.int32)),
                ]
                sender.send(pb_utils.InferenceResponse(outputs))
            if text.reshape(-1)[0] == b"error":
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("as you asked")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
