"""Values of plain JSON objects as tensors, and tensors as values: numbers, strings and nested lists, told no datatypes.

Beyond KServe's JSON, FP16 and BF16 are numbers too, which doubles hold exactly, and bytes that are not UTF-8 are
`{"base64": "…"}` in place of a string.
"""

from __future__ import annotations

import base64
import binascii
from itertools import chain
from typing import Any

import numpy as np
import orjson
import rapidjson

from gateway.jobs.files.declared_inputs import DeclaredInput
from schemas.errors import invalid
from schemas.json_tensors import pack_json_data
from schemas.json_text import MAX_JSON_DEPTH, too_deep
from schemas.tensors import Tensor, pack_bytes

BASE64 = "base64"
"""The only member of what stands for bytes that are not UTF-8."""


def tensor_of(declared: DeclaredInput, value: Any) -> Tensor:
    """The tensor of input `declared` that `value` gives. Raises WeirError."""
    if type(value) is not list:
        return Tensor(declared.name, declared.datatype, declared.scalar, _packed(declared, [value]))
    if value and type(value[0]) is list:
        value, shape = _flattened(declared, value)
        full = declared.shape_of(shape)
    else:
        full = declared.shape_of((len(value),))
    return Tensor(declared.name, declared.datatype, full, _packed(declared, value))


def _packed(declared: DeclaredInput, elements: list[Any]) -> bytes:
    datatype = declared.datatype
    if datatype == "BYTES":
        if dict in set(map(type, elements)):
            return pack_bytes([_bytes_of(declared, element) for element in elements])
    elif datatype == "FP16" or datatype == "BF16":
        wide = np.frombuffer(pack_json_data(declared.name, "FP32", elements, len(elements)), np.float32)
        if datatype == "BF16":
            return to_bf16(wide).tobytes()
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).tobytes()
    return pack_json_data(declared.name, datatype, elements, len(elements))


def _bytes_of(declared: DeclaredInput, element: Any) -> bytes:
    if type(element) is str:
        return element.encode()
    if type(element) is dict and element.keys() == {BASE64} and type(element[BASE64]) is str:
        try:
            return base64.b64decode(element[BASE64], validate=True)
        except binascii.Error:
            pass
    raise invalid(f"value of input '{declared.name}' is neither a string nor bytes as {{\"{BASE64}\": …}}")


def _flattened(declared: DeclaredInput, value: list[Any]) -> tuple[list[Any], list[int]]:
    """(the elements of nested lists, their shape)."""
    shape = [len(value)]
    while value and type(value[0]) is list:
        size = len(value[0])
        if len(shape) > MAX_JSON_DEPTH:
            raise too_deep()
        if any(type(row) is not list or len(row) != size for row in value):
            raise invalid(f"lists of unequal lengths are no value of input '{declared.name}'")
        shape.append(size)
        value = list(chain.from_iterable(value))
    return value, shape


def to_bf16(wide: np.ndarray) -> np.ndarray:
    """The bit patterns of float32 values as BF16, rounded to the nearest, ties to even."""
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # A NaN whose payload lies in the low half would be rounded to an infinity, or beyond.
    return np.where(np.isnan(wide), (bits >> 16).astype(np.uint16) | 0x40, rounded)


def from_bf16(patterns: np.ndarray) -> np.ndarray:
    """BF16 bit patterns as float32, exactly."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def json_rows(array: np.ndarray) -> list[Any]:
    """What orjson writes, with OPT_SERIALIZE_NUMPY, for each row of `array` along its first dimension.

    NaN and the infinities are bare literals, as in KServe's JSON. Objects are bytes.
    """
    if array.dtype.kind == "O":
        return [_json_strings(row) for row in array]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        # In float64 the digits of float32 would be others: only rows that need it are written so.
        return [row if np.isfinite(row).all() else _bare_literals(row) for row in array]
    return list(array)


def _bare_literals(row: Any) -> orjson.Fragment:
    return orjson.Fragment(rapidjson.dumps(row.tolist(), number_mode=rapidjson.NM_NAN))


def _json_strings(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_json_strings(element) for element in value]
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {BASE64: base64.b64encode(value).decode()}
