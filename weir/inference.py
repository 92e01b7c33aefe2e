"""Converts arrays to inference requests, and responses to arrays.

Source: `grpc_service.proto` of the KServe v2 protocol with Triton's extensions. Tensors are sent as raw contents.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weir.schemas.core.errors import invalid
from weir.schemas.core.tensors import DATATYPES, as_array, name_of_numpy
from weir.schemas.kserve.triton_messages import messages


class InferResult(Mapping[str, np.ndarray]):
    """The outputs of one response by name, as read-only arrays.

    BYTES tensors are object arrays of `bytes`; BF16 tensors are converted to float32. `model_name`, `model_version`, `id`
    (of the request) and `parameters` are those of the response.
    """

    def __init__(self, response: Any) -> None:
        self.model_name: str = response.model_name
        self.model_version: str = response.model_version
        self.id: str = response.id
        self.parameters = {name: parameter_value(one) for name, one in response.parameters.items()}
        self._arrays = {
            output.name: _received(output.datatype, list(output.shape), content)
            for output, content in zip(response.outputs, response.raw_output_contents, strict=False)
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        outputs = ", ".join(f"{name}: {array.dtype}{list(array.shape)}" for name, array in self._arrays.items())
        return f"InferResult({self.model_name!r}, {outputs})"


def infer_request(  # noqa: PLR0913 - the parts of a request
    model: str,
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | Mapping[str, int] = (),
    *,
    model_version: str | int = "",
    request_id: str = "",
    parameters: Mapping[str, str | bool | int | float] | None = None,
    sequence_id: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
    priority: int = 0,
    timeout_us: int | None = None,
) -> Any:
    """Build a request. An input is an array, or a pair of array-like values and a datatype: `(values, "FP32")`.

    `outputs` are the names of the requested outputs, all if empty; a mapping gives the number of classes to return for
    each (0: the tensor itself). Raises WeirError for an array without a datatype of the protocol.
    """
    request = messages.ModelInferRequest(model_name=model, model_version=str(model_version), id=request_id)
    for name, value in inputs.items():
        array, datatype = _array(name, value)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(_packed(array) if datatype == "BYTES" else array.tobytes())
    for name in outputs:
        output = request.outputs.add(name=name)
        if isinstance(outputs, Mapping) and outputs[name]:
            output.parameters["classification"].int64_param = outputs[name]
    for name, setting in (parameters or {}).items():
        request.parameters[name].CopyFrom(_parameter(name, setting))
    if sequence_id:
        field = "string_param" if isinstance(sequence_id, str) else "int64_param"
        setattr(request.parameters["sequence_id"], field, sequence_id)
        request.parameters["sequence_start"].bool_param = sequence_start
        request.parameters["sequence_end"].bool_param = sequence_end
    if priority:
        request.parameters["priority"].uint64_param = priority
    if timeout_us is not None:
        request.parameters["timeout"].int64_param = timeout_us
    return request


def parameter_value(parameter: Any) -> Any:
    """The value of `parameter`; None if it has none."""
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None


def _parameter(name: str, value: str | bool | int | float) -> Any:
    match value:
        case bool():
            return messages.InferParameter(bool_param=value)
        case int():
            return messages.InferParameter(int64_param=value)
        case float():
            return messages.InferParameter(double_param=value)
        case str():
            return messages.InferParameter(string_param=value)
    raise invalid(f"parameter '{name}' must be a string, a boolean or a number, not {type(value).__name__}")


def _array(name: str, value: Any) -> tuple[np.ndarray, str]:
    """The array and the datatype of input `name`; BF16 arrays are returned as their bits (uint16)."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        values, datatype = value
        if datatype not in DATATYPES:
            raise invalid(f"input '{name}' has unknown datatype '{datatype}'")
    else:
        values, datatype = value, None
    try:
        if datatype is None or datatype == "BF16":
            array = np.asarray(values)
        else:
            array = np.asarray(values, DATATYPES[datatype].numpy)
    except (ValueError, TypeError) as error:
        raise invalid(f"input '{name}' can't be an array of {datatype or 'any datatype'}: {error}") from error
    # Compared by name, so that the library ml_dtypes is not needed.
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), "BF16"
    if datatype == "BF16":
        return (array if array.dtype == np.uint16 else _rounded_to_bf16(array)), "BF16"
    datatype = datatype or name_of_numpy(array.dtype)
    if datatype is None:
        raise invalid(f"input '{name}' is an array of {array.dtype}, which is not a datatype of the protocol")
    return array, datatype


def _packed(array: np.ndarray) -> bytes:
    """Encode BYTES: each element after its length. An element that is not bytes is encoded as its text in UTF-8."""
    parts: list[bytes] = []
    for element in array.ravel():
        raw = bytes(element) if isinstance(element, bytes | bytearray | memoryview) else str(element).encode()
        parts += (struct.pack("<I", len(raw)), raw)
    return b"".join(parts)


def _rounded_to_bf16(array: np.ndarray) -> np.ndarray:
    """The bits of the nearest BF16 values, ties to even."""
    single = np.ascontiguousarray(array, np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding could turn a NaN into an infinity.
    return np.where(np.isnan(single), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _received(datatype: str, shape: list[int], content: bytes) -> np.ndarray:
    array = as_array(content, datatype, shape)
    return (array.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else array
