"""Returns `COUNT` copies of `text_input` (1 by default) in one response; "raise" and "error" fail."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)
        if text.size and text[0] == b"raise":
            raise ValueError("asked to raise")
        if text.size and text[0] == b"error":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("as you asked"))
        count = pb_utils.get_input_tensor_by_name(request, "COUNT")
        copies = np.repeat(text, 1 if count is None else int(count.as_numpy().reshape(-1)[0]))
        scores = np.arange(text.size, dtype=np.float32)
        outputs = [pb_utils.Tensor("text_output", copies), pb_utils.Tensor("scores", scores)]
        return pb_utils.InferenceResponse(outputs)
