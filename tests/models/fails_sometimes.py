"""Returns its input; version 2 fails each request whose number (modulo 100) is below `FAILS`."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts its requests."""

    def initialize(self, args):
        """Takes the share that fails from the configuration; version 1 never fails."""
        import json

        parameters = json.loads(args["model_config"])["parameters"]
        self.fails = int(parameters["fails_percent"]["string_value"]) if args["model_version"] == "2" else 0
        self.requests = 0

    def execute(self, requests):
        """The responses."""
        responses = []
        for request in requests:
            self.requests += 1
            if (self.requests * 37) % 100 < self.fails:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("it fails")))
                continue
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
