"""Tells each request in the how-manieth execution it ran (`TURN`), with how many others (`BATCH`).

A `VALUE` of 0 keeps the model busy: it makes the file `running` in the model's folder, and waits for the file `go`. One of
-1 runs until its request is cancelled, for 15 seconds at most, and says in `CANCELLED` whether it was.
"""

import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])
        self.turn = 0

    def execute(self, requests):
        turn, self.turn = self.turn, self.turn + 1
        values = [int(pb_utils.get_input_tensor_by_name(r, "VALUE").as_numpy().flat[0]) for r in requests]
        if 0 in values:
            self.wait()
        if -1 in values:
            until = time.monotonic() + 15
            while not requests[0].is_cancelled() and time.monotonic() < until:
                time.sleep(0.005)
        responses = []
        for request in requests:
            told = [("TURN", turn), ("BATCH", len(requests)), ("CANCELLED", int(request.is_cancelled()))]
            rows = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy().shape[0]
            tensors = [pb_utils.Tensor(name, np.full((rows, 1), value, np.int64)) for name, value in told]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses

    def wait(self):
        (self.folder / "running").touch()
        until = time.monotonic() + 50
        while not (self.folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.002)
        (self.folder / "go").unlink()
        (self.folder / "running").unlink()
