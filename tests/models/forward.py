"""Answers with the answer of the model that the parameter `way` names first; what follows there is passed on to it."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        name, _, rest = json.loads(request.parameters())["way"].partition(">")
        asked = pb_utils.InferenceRequest(
            model_name=name,
            inputs=request.inputs(),
            requested_output_names=request.requested_output_names(),
            parameters={"way": rest},
            trace=request.trace(),
        )
        return asked.exec()
