"""What magika's network sees of a file: its first and its last 1024 bytes, without the white space around them.

Source: the description of the features in the magika package (version 3 of its standard model).
"""

import numpy as np
import triton_python_backend_utils as pb_utils

BLOCK_BYTES = 4096
EDGE_BYTES = 1024
PADDING = 256


class TritonPythonModel:
    """Computes the features of files."""

    def execute(self, requests):
        return [pb_utils.InferenceResponse([features_of(request)]) for request in requests]


def features_of(request):
    files = pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy()
    return pb_utils.Tensor("bytes", np.stack([features(content) for content in files.reshape(-1)]))


def features(content):
    row = np.full(2 * EDGE_BYTES, PADDING, np.int32)
    head = content[:BLOCK_BYTES].lstrip()[:EDGE_BYTES]
    tail = content[-BLOCK_BYTES:].rstrip()[-EDGE_BYTES:]
    row[: len(head)] = np.frombuffer(head, np.uint8)
    row[len(row) - len(tail) :] = np.frombuffer(tail, np.uint8)
    return row
