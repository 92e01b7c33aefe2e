"""Runs the code that a request brings, and answers what it leaves in `r`, or what it raised."""

import gc
import json
import os
import runpy
import tempfile

import numpy as np
import triton_python_backend_utils as pb_utils

KEPT = {}
"""What code leaves for later requests to the same instance."""


class TritonPythonModel:
    """Two names are the code's own: `answer` is the response, `returned` is what `execute` returns."""

    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
            names = {"pb": pb_utils, "np": np, "self": self, "request": request, "kept": KEPT}
            names |= {"gc": gc, "json": json, "os": os}
            try:
                with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
                    file.write(code)
                    file.flush()
                    names = runpy.run_path(file.name, names)
                text = json.dumps(names.get("r"))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            if "raised" in names:
                raise names["raised"]
            if "returned" in names:
                return names["returned"]
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([text], dtype=object))])
            responses.append(names.get("answer", answer))
        return responses
