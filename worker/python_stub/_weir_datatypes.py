"""Triton's datatypes as a Python model meets them: by number, by configuration name, by numpy type.

The numbers are those of `DataType` in Triton's `model_config.proto`. The server's own table (`schemas.datatypes`) can't
be imported in a model's process, where `schemas` may be the user's; a test holds the two together.
"""

from __future__ import annotations

import numpy as np

NAMES = [
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
]
"""Wire names, each at the index that is its number."""

NUMBERS = {name: number for number, name in enumerate(NAMES)}

_SCALARS: list[type[np.generic]] = [
    *(np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64),
    *(np.float16, np.float32, np.float64, np.object_),
]
SCALARS: dict[str, type[np.generic]] = dict(zip(NAMES[1:], _SCALARS, strict=False))
"""Numpy scalar types by wire name; BF16 has none."""

DTYPES = {name: np.dtype(scalar) for name, scalar in SCALARS.items()} | {"BF16": np.dtype(np.uint16)}
"""Numpy types of tensors' content by wire name; BF16 elements are carried as their 16 bits."""

# Kind and size, not the dtype: byte order and the C type behind it don't matter.
_BY_LAYOUT = {(dtype.kind, dtype.itemsize): name for name, dtype in DTYPES.items() if name not in ("BYTES", "BF16")}


def name_of_numpy(dtype: np.dtype) -> str | None:
    """The wire name of a numpy type: BYTES for objects and strings; None where Triton has no such type."""
    name = _BY_LAYOUT.get((dtype.kind, dtype.itemsize))
    if name is not None:
        return name
    if dtype.kind in "OSU":
        return "BYTES"
    return "BF16" if dtype.name == "bfloat16" else None
