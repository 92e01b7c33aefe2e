"""Tensors of ONNX Runtime: their types and shapes, and the conversion of their content from and to arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from weir.repository.completion import DescribedTensor
from weir.schemas.core.errors import invalid
from weir.schemas.core.tensors import BY_CONFIG_NAME, Datatype

_TYPES = {
    "tensor(float)": ("TYPE_FP32", 1),
    "tensor(uint8)": ("TYPE_UINT8", 2),
    "tensor(int8)": ("TYPE_INT8", 3),
    "tensor(uint16)": ("TYPE_UINT16", 4),
    "tensor(int16)": ("TYPE_INT16", 5),
    "tensor(int32)": ("TYPE_INT32", 6),
    "tensor(int64)": ("TYPE_INT64", 7),
    "tensor(string)": ("TYPE_STRING", 8),
    "tensor(bool)": ("TYPE_BOOL", 9),
    "tensor(float16)": ("TYPE_FP16", 10),
    "tensor(double)": ("TYPE_FP64", 11),
    "tensor(uint32)": ("TYPE_UINT32", 12),
    "tensor(uint64)": ("TYPE_UINT64", 13),
    "tensor(bfloat16)": ("TYPE_BF16", 16),
}
"""By ONNX Runtime's names: the types in configurations, and ONNX's numbers (`TensorProto.DataType`)."""

STRING = "tensor(string)"
BFLOAT16 = "tensor(bfloat16)"


def config_type(onnx_type: str) -> str:
    """The type in configurations. Raises WeirError for a type that Triton does not have."""
    try:
        return _TYPES[onnx_type][0]
    except KeyError as error:
        raise invalid(f"tensors of type {onnx_type} are not supported") from error


def datatype(onnx_type: str) -> Datatype:
    """The datatype. Raises WeirError as `config_type` does."""
    return BY_CONFIG_NAME[config_type(onnx_type)]


def element_type(onnx_type: str) -> int:
    """The number of the type in ONNX, with which tensors are bound. Raises WeirError as `config_type` does."""
    config_type(onnx_type)
    return _TYPES[onnx_type][1]


def dims(tensor: Any) -> list[int]:
    """The shape of an input or output of a session; a dimension without a number is -1."""
    return [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in tensor.shape]


def described(tensor: Any) -> DescribedTensor:
    """Name, type and shape of an input or output of a session."""
    symbol = next((dim for dim in tensor.shape[:1] if isinstance(dim, str)), "")
    return DescribedTensor(tensor.name, config_type(tensor.type), dims(tensor), symbol)


def decoded(name: str, array: np.ndarray) -> np.ndarray:
    """An array of `bytes` as an array of `str`. Raises WeirError for bytes that are not UTF-8.

    ONNX Runtime's Python interface would convert `bytes` with `str(...)`.
    """
    try:
        elements = [element.decode() for element in array.ravel()]
    except UnicodeDecodeError as error:
        raise invalid(f"input '{name}' holds a string that is not UTF-8") from error
    return np.array(elements, dtype=np.object_).reshape(array.shape)


def bind_array(binding: Any, name: str, onnx_type: str, array: np.ndarray) -> np.ndarray:
    """Binds an input in host memory, which can't be strings.

    The returned array must live until the session has run.
    """
    array = np.ascontiguousarray(array)
    binding.bind_input(name, "cpu", 0, element_type(onnx_type), array.shape, array.ctypes.data)
    return array


def array_of(value: Any) -> np.ndarray:
    """The content of an `OrtValue` in host memory."""
    if value.data_type() != BFLOAT16:
        array: np.ndarray = value.numpy()
        return array
    # The Python interface has no arrays of BF16; Weir's hold the bit patterns as uint16.
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, np.uint16)
    content = memoryview((ctypes.c_uint16 * count).from_address(value.data_ptr()))
    return np.array(content, np.uint16).reshape(shape)
