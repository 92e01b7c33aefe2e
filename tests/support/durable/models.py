"""Small models for durable requests, with outputs that the producers know."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.compare.networks import NETWORKS

IDENTITY = "identity_fp32"
DIGEST = "digest"
SLEEPER = "sleeper"

_DIGEST_CODE = """
import hashlib
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "DATA").as_numpy()
            rows = [[hashlib.sha256(file).hexdigest().encode()] for file in files.reshape(-1)]
            means = [[np.frombuffer(file, np.uint8).mean() if file else 0] for file in files.reshape(-1)]
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SHA256", np.array(rows, np.object_)),
                pb_utils.Tensor("MEAN", np.array(means, np.float32)),
            ]))
        return responses
"""
_DIGEST = """
backend: "python" max_batch_size: 64
input { name: "DATA" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "SHA256" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "MEAN" data_type: TYPE_FP32 dims: [ 1 ] }
dynamic_batching { } instance_group { kind: KIND_CPU count: 1 }
"""
_SLEEPER_CODE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(%(seconds)r)
        rows = [pb_utils.get_input_tensor_by_name(request, "DATA").as_numpy() for request in requests]
        offline = sum(int((row < 0).sum()) for row in rows)
        live = sum(len(row) for row in rows) - offline
        told = [np.tile(np.array([[live, offline]], np.int64), (len(row), 1)) for row in rows]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ROWS", array)]) for array in told]
"""
_SLEEPER = """
backend: "python" max_batch_size: %(rows)d
input { name: "DATA" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "ROWS" data_type: TYPE_INT64 dims: [ 2 ] }
dynamic_batching { } instance_group { kind: KIND_CPU count: %(instances)d }
"""


def write_identity(repository: Path) -> None:
    """64 B in, 64 B out, as in `benchmarks.compare`."""
    NETWORKS[IDENTITY].write(repository, "onnxruntime")


def write_digest(repository: Path) -> None:
    """SHA-256 and mean of some bytes: an answer that is another's, or half of one, shows."""
    _write(repository, DIGEST, _DIGEST, _DIGEST_CODE)


def write_sleeper(repository: Path, seconds: float, rows: int, instances: int) -> None:
    """Batches of up to `rows` that take the same time, however full they are.

    Who sends a negative number is an offline job. Each answer tells how many rows of its batch were live, how many not.
    """
    settings = {"seconds": seconds, "rows": rows, "instances": instances}
    _write(repository, SLEEPER, _SLEEPER % settings, _SLEEPER_CODE % settings)


def _write(repository: Path, name: str, config: str, code: str) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    (folder.parent / "config.pbtxt").write_text(config)


def digest_request(payload: bytes) -> tuple[bytes, bytes]:
    """(header of JSON, binary tensor behind it) of a request to `digest`."""
    tensor = len(payload).to_bytes(4, "little") + payload
    given = {"name": "DATA", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(tensor)}}
    return json.dumps({"inputs": [given], "outputs": [{"name": "SHA256"}]}).encode(), tensor
