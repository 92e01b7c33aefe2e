"""Fails as its input `WHAT` asks: "error" and "cancelled" are answers, "raise" fails the batch, "exit" and "kill" end it.

Anything else comes back as `SAID`.
"""

import os
import signal

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "WHAT").as_numpy()) for request in requests]

    def answer(self, what):
        word = what.reshape(-1)[0]
        if word == b"error":
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("as you asked", pb_utils.TritonError.NOT_FOUND)
            )
        if word == b"cancelled":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("given up", pb_utils.TritonError.CANCELLED))
        if word == b"raise":
            raise ValueError("asked to raise")
        if word == b"exit":
            os._exit(3)
        if word == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", what)])
