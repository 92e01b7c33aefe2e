"""Asks model `here` the same, and answers with what it has said."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            asked = pb_utils.InferenceRequest(model_name="here", requested_output_names=["OUT"], inputs=[tensor])
            output = pb_utils.get_output_tensor_by_name(asked.exec(), "OUT")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", output.as_numpy())]))
        return responses
