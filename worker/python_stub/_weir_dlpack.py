"""DLPack in and out of numpy arrays, BF16 included.

Numpy speaks DLPack but has no BF16. Its elements travel as uint16 arrays, and the type in the capsule is rewritten on
the way, as described by DLPack's C header (`DLTensor`, `DLDataType`).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from _weir_datatypes import name_of_numpy
from _weir_errors import TritonModelException

_UINT, _BFLOAT = 1, 4
_HOST_DEVICES = (1, 3)  # plain and CUDA-pinned


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Capsule:
    """What `numpy.from_dlpack` asks of its argument, around a bare capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class _Writable:
    """An array's memory as one that may be written to.

    Numpy takes what a bare capsule brings for read-only, and would neither let a model change it nor export it again.
    """

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._array.__array_interface__
        return interface | {"data": (interface["data"][0], False)}


class _Owned:
    """The memory of an array that belongs to `owner`: an array made of this holds a reference to the owner."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.__array_interface__ = array.__array_interface__
        self._owner = owner


def export_array(array: np.ndarray, datatype: str, owner: object) -> Any:
    """A capsule over `array`, whose elements are of the wire type `datatype`; it holds a reference to `owner`."""
    capsule = np.asarray(_Owned(array, owner)).__dlpack__()
    if datatype == "BF16":
        _described(capsule).code = _BFLOAT
    return capsule


def import_array(source: Any) -> tuple[np.ndarray, str]:
    """(array over the capsule's memory, wire type). Raises TritonModelException; see `Tensor.from_dlpack`."""
    if hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] not in _HOST_DEVICES:
        source = _on_host(source)
    capsule = source.__dlpack__() if hasattr(source, "__dlpack__") else source
    try:
        described = _described(capsule)
    except (ValueError, ctypes.ArgumentError) as error:
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` and "
            "`__dlpack_device__` attributes"
        ) from error
    if described.device_type not in _HOST_DEVICES:
        return import_array(_on_host(capsule))
    is_bfloat = described.code == _BFLOAT
    if is_bfloat:
        described.code = _UINT
    array = np.asarray(_Writable(np.from_dlpack(_Capsule(capsule))))
    if not array.flags.c_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    datatype = "BF16" if is_bfloat else name_of_numpy(array.dtype)
    if datatype is None:
        raise TritonModelException(f"Unsupported data type '{array.dtype}' in a DLPack tensor.")
    return array, datatype


def _on_host(source: Any) -> Any:
    """The same in host memory: copied by the framework that it comes from, or by torch or cupy for a bare capsule.

    That waits for what its current stream does before, so the content is complete.
    """
    for name in ("cpu", "get"):  # torch's and others', cupy's
        copy = getattr(source, name, None)
        if callable(copy):
            return copy()
    reason = ""
    for name in ("torch", "cupy"):
        framework = sys.modules.get(name)  # whoever made it has imported one of them
        if framework is not None:
            try:
                return _on_host(framework.from_dlpack(source))
            except Exception as error:  # noqa: BLE001 - a build without that kind of device raises what it likes
                reason = f": {name}: {error}"
    raise TritonModelException(
        f"a DLPack tensor in the memory of a device can be copied to the host where torch or cupy is imported only{reason}"
    )


def _described(capsule: Any) -> _DLTensor:
    return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
