"""Converts arrays of numpy, and memory of a device, to tensors of torch and back.

Nothing is copied without need. Requests lie in memory that others read as well, and that may be read-only: a model that
could change its inputs in place gets copies of read-only ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weir.schemas.core.errors import invalid
from weir.schemas.core.tensors import DATATYPES
from weir.worker.backend_api.interface import DeviceTensor
from weir.worker.backends.pytorch.signature import STRINGS, TENSOR, Argument

_TORCH_NAMES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}

_CASTS: Mapping[str, type] = {"int": int, "float": float, "bool": bool}


class TensorConverter:
    """Converts for one model. `torch` is the library; `copies_inputs`: the model could write to its inputs."""

    def __init__(self, torch: Any, copies_inputs: bool) -> None:
        self._torch = torch
        self._copies_inputs = copies_inputs
        self._names = {getattr(torch, theirs): name for name, theirs in _TORCH_NAMES.items() if hasattr(torch, theirs)}

    def config_type(self, dtype: Any) -> str | None:
        """The name of a torch type in configurations ("TYPE_FP32"), None for one that Triton does not have."""
        name = self._names.get(dtype)
        return None if name is None else DATATYPES[name].config_name

    def argument(self, argument: Argument, name: str, array: np.ndarray, datatype: str) -> Any:
        """The model's argument for an input: a tensor, a list of strings, or a number."""
        if array.dtype.hasobject:
            return _strings(name, array)
        if argument.kind == TENSOR:
            return self.tensor(array, datatype)
        if argument.kind == STRINGS:
            raise invalid(f"input '{name}' must be of type TYPE_STRING, because the model takes a list of strings")
        return _number(argument, name, array)

    def tensor(self, array: np.ndarray, datatype: str) -> Any:
        """The array as a tensor, over the same memory where that is allowed."""
        if self._copies_inputs and not array.flags.writeable:
            array = array.copy()
        tensor = self._torch.from_numpy(array)
        return tensor.view(self._torch.bfloat16) if datatype == "BF16" else tensor

    def device_tensor(self, tensor: DeviceTensor, device: str) -> Any:
        """A tensor over memory of a GPU, without a copy."""
        numpy_type = np.dtype(np.int16) if tensor.datatype == "BF16" else DATATYPES[tensor.datatype].numpy
        if 0 in tensor.shape:
            empty = self._torch.empty(tensor.shape, dtype=getattr(self._torch, _TORCH_NAMES[tensor.datatype]))
            return empty.to(device)
        view = self._torch.as_tensor(_CudaArray(tensor, numpy_type.str), device=device)
        return view.view(self._torch.bfloat16) if tensor.datatype == "BF16" else view

    def array(self, name: str, value: Any, datatype: str) -> np.ndarray:
        """An output as an array. Raises WeirError if its type differs from that in the configuration."""
        if isinstance(value, list):
            return _string_array(name, value, datatype)
        tensor = self.checked(name, value, datatype)
        if datatype == "BF16":
            tensor = tensor.contiguous().view(self._torch.uint16)
        array: np.ndarray = tensor.numpy(force=True)
        return array

    def checked(self, name: str, value: Any, datatype: str) -> Any:
        """The output `value`, if it is a tensor of this datatype. Raises WeirError otherwise."""
        if not isinstance(value, self._torch.Tensor):
            raise invalid(
                f"output '{name}' must be of type Tensor, List[str] or Tuple containing one of these two types, found "
                f"type '{type(value).__name__}'"
            )
        found = self._names.get(value.dtype)
        if found != datatype:
            actual = f"TYPE_{found}" if found else str(value.dtype)
            raise invalid(
                f"unexpected datatype {actual} for inference output '{name}', expecting {DATATYPES[datatype].config_name}"
            )
        return value

    def on_device(self, value: Any, datatype: str) -> DeviceTensor:
        """A checked tensor in memory of a GPU."""
        tensor = value.contiguous()
        return DeviceTensor(datatype, tuple(tensor.shape), tensor.data_ptr(), tensor)


class _CudaArray:
    __slots__ = ("__cuda_array_interface__", "_owner")

    def __init__(self, tensor: DeviceTensor, typestr: str) -> None:
        self._owner = tensor.owner
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.pointer, False),
            "version": 2,  # without a stream: the caller has ordered all work on the memory
        }


def _strings(name: str, array: np.ndarray) -> list[str]:
    try:
        return [element.decode() for element in array.ravel()]
    except UnicodeDecodeError as error:
        raise invalid(f"input '{name}' holds a string that is not UTF-8") from error


def _number(argument: Argument, name: str, array: np.ndarray) -> Any:
    values = np.unique(array)
    if len(values) != 1:
        raise invalid(
            f"input '{name}' must hold one value, because the model takes {argument.kind} for it, found "
            f"{array.size} elements"
        )
    return _CASTS[argument.kind](values[0])


def _string_array(name: str, value: list[Any], datatype: str) -> np.ndarray:
    if datatype != "BYTES" or not all(isinstance(element, str) for element in value):
        raise invalid(f"output '{name}' is a list of strings, which only TYPE_STRING can be, expecting {datatype}")
    array = np.empty(len(value), np.object_)
    array[:] = [element.encode() for element in value]
    return array
