"""DLPack, in pure Python: capsules of `DeviceTensor`s, and `DeviceTensor`s of other libraries' capsules.

Source: `dlpack.h` of DLPack 0.8 (unversioned capsules, which all libraries read and write), and the Python specification of
the array API standard.
"""

from __future__ import annotations

import ctypes
from typing import Any

from weir.schemas.core.errors import invalid
from weir.schemas.core.tensors import DATATYPES, element_count
from weir.worker.backend_api.interface import DeviceTensor

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Kinds of devices."""

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6

_TYPES = {
    "BOOL": (_BOOL, 8),
    "UINT8": (_UINT, 8),
    "UINT16": (_UINT, 16),
    "UINT32": (_UINT, 32),
    "UINT64": (_UINT, 64),
    "INT8": (_INT, 8),
    "INT16": (_INT, 16),
    "INT32": (_INT, 32),
    "INT64": (_INT, 64),
    "FP16": (_FLOAT, 16),
    "BF16": (_BFLOAT, 16),
    "FP32": (_FLOAT, 32),
    "FP64": (_FLOAT, 64),
}
_DATATYPES = {code: name for name, code in _TYPES.items()}

_NEW, _USED = b"dltensor", b"used_dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", _api)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
# For destructors, which get a capsule that is no valid object any more.
_is_valid_address = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

_exported: dict[int, tuple[object, ...]] = {}
"""What the consumers of capsules use, by the address of its structure."""


def _release(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def _destroy_capsule(capsule: int) -> None:
    # A capsule that was consumed has another name; its consumer calls the deleter.
    if _is_valid_address(capsule, _NEW):
        _exported.pop(_pointer_of_address(capsule, _NEW), None)


_delete, _destroy = _Deleter(_release), _Destructor(_destroy_capsule)


def capsule_of(tensor: DeviceTensor, kind: int, number: int) -> object:
    """A capsule over the tensor's memory, which stays valid until its consumer releases it."""
    dims = len(tensor.shape)
    shape = (ctypes.c_int64 * max(1, dims))(*tensor.shape)
    code, bits = _TYPES[tensor.datatype]
    managed = _Managed(
        _Tensor(tensor.pointer, _Device(kind, number), dims, _Type(code, bits, 1), shape, None, 0), None, _delete
    )
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, tensor)
    return _new_capsule(address, _NEW, _destroy)


class _Owner:
    """Calls the deleter of a consumed capsule with its last reference."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed

    def __del__(self) -> None:
        deleter = self._managed.contents.deleter
        if deleter:
            deleter(self._managed)


def tensor_of(capsule: object) -> tuple[DeviceTensor, int, int]:
    """The contiguous tensor in a capsule, which is consumed, and its kind and number of device.

    Raises WeirError for a datatype that Triton does not have, and for a tensor that is not contiguous.
    """
    if not _is_valid(capsule, _NEW):
        raise invalid("the DLPack capsule was consumed already, or is of another version")
    managed = ctypes.cast(_pointer_of(capsule, _NEW), ctypes.POINTER(_Managed))
    # Consuming means renaming: from now on the producer leaves the memory to the deleter.
    _set_name(capsule, _USED)
    owner, tensor = _Owner(managed), managed.contents.tensor
    shape = tuple(tensor.shape[at] for at in range(tensor.ndim))
    datatype = _DATATYPES.get((tensor.dtype.code, tensor.dtype.bits))
    if datatype is None or tensor.dtype.lanes != 1:
        raise invalid(f"DLPack type {tensor.dtype.code} of {tensor.dtype.bits} bits has no datatype of Triton's")
    if tensor.strides and element_count(shape):
        strides = tuple(tensor.strides[at] for at in range(tensor.ndim))
        check_contiguous(shape, strides)
    made = DeviceTensor(datatype, shape, (tensor.data or 0) + tensor.byte_offset, owner)
    return made, tensor.device.kind, tensor.device.number


def check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raises WeirError unless `strides`, in elements, are those of a contiguous tensor."""
    expected = 1
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim != 1 and stride != expected:
            raise invalid(f"a tensor of shape {list(shape)} has strides {list(strides)}: it must be contiguous")
        expected *= dim


def typestr_of(datatype: str) -> str:
    """The type as in `__cuda_array_interface__`; BF16, which that does not have, as bits."""
    return str(DATATYPES[datatype].numpy.str)
