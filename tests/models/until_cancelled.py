"""Sends responses with numbers from 0 until its request is cancelled, then MORE others, and an error where that is 0."""

import itertools
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            more = int(pb_utils.get_input_tensor_by_name(request, "MORE").as_numpy()[0])
            sender = request.get_response_sender()
            numbers = itertools.count()
            while not request.is_cancelled():
                self.send(sender, next(numbers))
                time.sleep(0.005)
            for _ in range(more):
                self.send(sender, next(numbers))
            stopped = pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED)
            last = None if more else pb_utils.InferenceResponse(error=stopped)
            sender.send(last, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, sender, number):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
