"""KServe v2 datatypes: their names on the wire, in `config.pbtxt`, in numpy, and their sizes.

Source: the KServe v2 protocol's tensor data types and Triton's `DataType` enum (`model_config.proto`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Datatype:
    """One element type of tensors.

    `size_bytes` is the size of an element, 0 for BYTES, whose elements each carry a 4-byte little-endian length.
    BF16 has no numpy type: its elements are carried as uint16 bit patterns.
    """

    name: str
    config_name: str
    numpy: np.dtype
    size_bytes: int


_ROWS = [
    ("BOOL", "TYPE_BOOL", np.bool_, 1),
    ("UINT8", "TYPE_UINT8", np.uint8, 1),
    ("UINT16", "TYPE_UINT16", np.uint16, 2),
    ("UINT32", "TYPE_UINT32", np.uint32, 4),
    ("UINT64", "TYPE_UINT64", np.uint64, 8),
    ("INT8", "TYPE_INT8", np.int8, 1),
    ("INT16", "TYPE_INT16", np.int16, 2),
    ("INT32", "TYPE_INT32", np.int32, 4),
    ("INT64", "TYPE_INT64", np.int64, 8),
    ("FP16", "TYPE_FP16", np.float16, 2),
    ("BF16", "TYPE_BF16", np.uint16, 2),
    ("FP32", "TYPE_FP32", np.float32, 4),
    ("FP64", "TYPE_FP64", np.float64, 8),
    ("BYTES", "TYPE_STRING", np.object_, 0),
]

DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, config, np.dtype(dtype), size) for name, config, dtype, size in _ROWS
}
"""Every datatype by its name on the wire ("FP32")."""

BY_CONFIG_NAME: dict[str, Datatype] = {datatype.config_name: datatype for datatype in DATATYPES.values()}
"""Every datatype by its name in `config.pbtxt` ("TYPE_FP32")."""

_BY_NUMPY = {datatype.numpy: datatype.name for datatype in reversed(DATATYPES.values()) if datatype.name != "BF16"}


def name_of_numpy(dtype: np.dtype) -> str | None:
    """The wire name of a numpy type; BYTES for objects and fixed-width strings; None for types the protocol lacks."""
    if dtype.kind in "SUO":
        return "BYTES"
    return _BY_NUMPY.get(dtype)
