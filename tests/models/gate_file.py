"""Answers with the `PATH` it is asked with if there is such a file, and with an error if there is none."""

import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "PATH").as_numpy()) for request in requests]

    def answer(self, path):
        if os.path.exists(path.reshape(-1)[0].decode()):
            return pb_utils.InferenceResponse([pb_utils.Tensor("FOUND", path)])
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("there is no such file"))
