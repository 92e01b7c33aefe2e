"""Answers who runs it: `NAME`, `KIND` and `PID` of its instance, and the `CORES` it may use; sleeps `DELAY_MS` first.

`SUM` is that of what the request's sequence has sent, where it has one.
"""

import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def text(name, value):
    return pb_utils.Tensor(name, np.array([[value.encode()]], np.object_))


class TritonPythonModel:
    def initialize(self, args):
        self.name, self.kind = args["model_instance_name"], args["model_instance_kind"]
        self.sums = {}
        if self.name.startswith("refused"):
            raise ValueError("not under this name")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        delay_ms = int(pb_utils.get_input_tensor_by_name(request, "DELAY_MS").as_numpy().ravel()[0])
        time.sleep(delay_ms / 1000)
        sequence = request.correlation_id()
        if request.flags() & 1:
            self.sums[sequence] = 0
        if sequence:
            self.sums[sequence] += delay_ms  # a KeyError where the sequence was begun elsewhere
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        return pb_utils.InferenceResponse(
            [
                text("NAME", self.name),
                text("KIND", self.kind),
                pb_utils.Tensor("PID", np.array([[os.getpid()]], np.int64)),
                text("CORES", cores),
                pb_utils.Tensor("SUM", np.array([[self.sums.get(sequence, 0)]], np.int64)),
            ]
        )
