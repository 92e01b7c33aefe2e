"""Decodes a picture, and scales it to what the detector takes: sides that are multiples of 32, values in -1 .. 1.

Source of the numbers: the configuration of the detector in the rapidocr-onnxruntime package.
"""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

MAX_SIDE = 960
SIDE_STEP = 32


class TritonPythonModel:
    """Decodes and scales pictures."""

    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    encoded = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)[0]
    picture = decoded(encoded)
    if picture is None:
        error = pb_utils.TritonError("IMAGE is not a picture that can be decoded", pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
    tensors = [pb_utils.Tensor("PICTURE", picture), pb_utils.Tensor("SCALED", scaled(picture))]
    return pb_utils.InferenceResponse(tensors)


def decoded(encoded):
    """uint8 [height, width, 3], blue first, as the networks were trained; None if it is no picture."""
    return cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR) if encoded else None


def scaled(picture):
    height, width = picture.shape[:2]
    factor = min(1.0, MAX_SIDE / max(height, width))
    new_width, new_height = (max(1, round(side * factor / SIDE_STEP)) * SIDE_STEP for side in (width, height))
    small = cv2.resize(picture, (new_width, new_height)).astype(np.float32)
    return np.ascontiguousarray(small.transpose(2, 0, 1)[None] / 127.5 - 1)
