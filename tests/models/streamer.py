"""Sends each request the responses that its input `PLAN`, a JSON object, asks for; works decoupled or not.

`responses` many, each with its `NUMBER` and a `CONTENT` of `size` bytes, `pause_ms` before each; `in_thread` after
execute has returned; `bare_end` or `end_never` instead of an end with the last; `error_at` answers an error; `raise_at`,
`kill_at` before that response; `until_cancelled` sends (or with `silent` waits) until the caller has gone, then writes how
many it has sent to the file named by it (and before it begins, one of that name and `.begun`).
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        threads = []
        for request in requests:
            plan = json.loads(pb_utils.get_input_tensor_by_name(request, "PLAN").as_numpy().ravel()[0])
            if plan.get("in_thread"):
                threads.append(threading.Thread(target=self.send, args=(request, plan)))
            else:
                self.send(request, plan)
        for thread in reversed(threads):
            thread.start()

    def send(self, request, plan):
        sender = request.get_response_sender()
        if "until_cancelled" in plan:
            self.send_until_cancelled(request, sender, plan)
            return
        count = plan["responses"]
        for number in range(count):
            time.sleep(plan.get("pause_ms", 0) / 1000)
            if plan.get("raise_at") == number:
                raise ValueError("asked to raise")
            if plan.get("kill_at") == number:
                os.kill(os.getpid(), signal.SIGKILL)
            ends = number == count - 1 and not plan.get("bare_end") and not plan.get("end_never")
            sender.send(self.response(number, plan), FINAL if ends else 0)
        if (plan.get("bare_end") or count == 0) and not plan.get("end_never"):
            sender.send(flags=FINAL)

    def send_until_cancelled(self, request, sender, plan):
        Path(plan["until_cancelled"] + ".begun").touch()
        number = 0
        while not sender.is_cancelled():
            if not plan.get("silent"):
                sender.send(self.response(number, plan))
                number += 1
            time.sleep(0.005)
        assert request.is_cancelled()
        Path(plan["until_cancelled"]).write_text(str(number))
        sender.send(self.response(number, plan), FINAL)

    def response(self, number, plan):
        if plan.get("error_at") == number:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"error {number}", pb_utils.TritonError.NOT_FOUND)
            )
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("NUMBER", np.array([[number]], np.int32)),
                pb_utils.Tensor("CONTENT", np.full((1, plan.get("size", 1)), number % 251, np.uint8)),
            ]
        )
