"""Does to its process what its input `WHAT` asks, and answers `SAID` with the process's id, a colon and the input.

"hang" never returns, "kill" ends the process at once, "grow N" keeps N MiB, "grow-fast N" fills N MiB and frees it after a
while, "unready" and "ready" are what `is_ready` says from then on.
"""

import os
import signal
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kept = []
        self.ready = True

    def is_ready(self):
        return self.ready

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "WHAT").as_numpy()) for request in requests]

    def answer(self, what):
        word, _, number = what.reshape(-1)[0].decode().partition(" ")
        if word == "hang":
            while True:
                time.sleep(60)
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "grow":
            self.kept.append(np.ones(int(number) << 20, np.uint8))
        if word == "grow-fast":
            kept = [np.ones(1 << 20, np.uint8) for _ in range(int(number))]
            time.sleep(30)
            del kept
        if word in ("ready", "unready"):
            self.ready = word == "ready"
        said = [f"{os.getpid()}:{row.decode()}".encode() for row in what.reshape(-1)]
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array(said, np.object_).reshape(what.shape))])
