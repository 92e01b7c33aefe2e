"""Decoupled: returns the first three characters of `TEXT`, each in a response of its own."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
            sender = request.get_response_sender()
            for letter in text[:3]:
                output = np.array([letter.encode()], np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("LETTER", output)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
