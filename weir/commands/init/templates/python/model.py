"""A Python model: returns its input times two."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The server makes one object for each instance, and calls its methods one at a time."""

    def initialize(self, args):
        """Prepares the instance. `args` has the configuration, and the kind and id of the device."""
        self.config = json.loads(args["model_config"])

    def execute(self, requests):
        """Runs a batch: returns one response for each request, in the same order."""
        # The first dimension of each array is the batch of one request. Join the arrays where a call is costly.
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        return [self.respond(array) for array in arrays]

    def respond(self, array):
        """The response to one request."""
        output = (array * 2).astype(np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])

    def finalize(self):
        """Ends the instance."""
