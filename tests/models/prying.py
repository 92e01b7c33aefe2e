"""Answers with the names in its environment, and with what it can read of its own process and of those above it."""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


def _above(pid):
    return int(_readable(pid, "status").split("PPid:")[1].split()[0])


def _readable(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class TritonPythonModel:
    def execute(self, requests):
        worker = os.getppid()
        seen = [
            _readable(pid, name) for pid in (os.getpid(), worker, _above(worker)) for name in ("environ", "cmdline")
        ]
        told = np.array([[json.dumps([sorted(os.environ), seen])]], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", told)]) for _ in requests]
