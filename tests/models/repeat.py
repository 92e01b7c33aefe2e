"""Answers each element of IN in a response of its own, DELAY[i] ms after the one before, as Triton's repeat backend.

Its execute returns after WAIT ms, while a thread still sends; OUT is the element, IDX its place.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values, delays_ms, wait_ms = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            sender = request.get_response_sender()
            threading.Thread(target=self.send, args=(sender, values.copy(), delays_ms.copy())).start()
            time.sleep(wait_ms[0] / 1000)

    def send(self, sender, values, delays_ms):
        for place, (value, delay_ms) in enumerate(zip(values, delays_ms, strict=True)):
            time.sleep(delay_ms / 1000)
            outputs = [
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([place], np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
