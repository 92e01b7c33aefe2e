"""Raw requests of the KServe v2 HTTP protocol: a body that is the content of a model's only input, and nothing else.

Source: Triton's binary data extension, "raw binary request"; texts compared with a running Triton 2.51.
"""

from __future__ import annotations

import math

from schemas.datatypes import BY_CONFIG_NAME
from schemas.model_config import ModelConfig, ModelInput
from schemas.request_errors import raw_too_large, refused
from schemas.request_limits import DEFAULT_LIMITS, RequestLimits
from schemas.requests import InferRequest
from schemas.tensors import Tensor, element_count, pack_bytes


def parse_raw_request(
    model_name: str,
    model_version: str,
    body: bytes | bytearray | memoryview,
    config: ModelConfig,
    limits: RequestLimits = DEFAULT_LIMITS,
) -> InferRequest:
    """The request whose whole `body` is its only input; every output is to come as binary.

    The batch size is 1, the size of a variable dimension follows from that of the body, and a BYTES input has one
    element: the body. Other content is a view over `body`. Raises WeirError (INVALID_ARG).
    """
    data = memoryview(body)
    if len(data) > limits.input_size:
        raise raw_too_large(len(data), limits.input_size)
    if len(config.input) != 1:
        raise refused(
            "",
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.input)} inputs in "
            f"'{model_name}' model configuration",
        )
    declared = config.input[0]
    datatype = BY_CONFIG_NAME[declared.data_type]
    shape = _deduced_shape(declared, len(data))
    expected = element_count(shape) * datatype.size_bytes
    if datatype.name != "BYTES" and expected != len(data):
        # Triton calls it so: the check comes before the input gets its name from the configuration.
        raise refused(
            "",
            f"input byte size mismatch for input 'raw_input' for model '{model_name}'. "
            f"Expected {expected}, got {len(data)}",
        )
    request = InferRequest(model_name, model_version)
    batch = [1] if config.max_batch_size > 0 else []
    content = pack_bytes([data]) if datatype.name == "BYTES" else data
    request.inputs.append(Tensor(declared.name, datatype.name, batch + shape, content))
    request.binary_default = True
    return request


def _deduced_shape(declared: ModelInput, size: int) -> list[int]:
    """The shape, without the batch dimension, of `size` bytes of content for the `declared` input."""
    shape = list(declared.dims)
    known = math.prod(dim for dim in shape if dim != -1)
    variable = shape.count(-1)
    if variable > 1:
        raise refused(
            "",
            f"The shape of the raw input '{declared.name}' can not be deduced because there are more than one "
            "variable-sized dimension",
        )
    if declared.data_type == "TYPE_STRING":
        if variable or known != 1:
            raise refused("", f"For BYTE datatype raw input '{declared.name}', the model must have input shape [1]")
    elif variable:
        shape[shape.index(-1)] = size // (known * BY_CONFIG_NAME[declared.data_type].size_bytes)
    return shape
