"""Tensor content as JSON values, both ways, by Triton's type rules.

Going in, integers are taken for floats and never floats for integers, BOOL wants true or false, and an integer that
does not fit its width loses its high bits silently. Going out, floats are written as doubles, NaN and the infinities as
bare literals, which standard JSON lacks. FP16 and BF16 travel as binary only.

Source: the behaviour of Triton's HTTP front end, compared with a running Triton 2.51.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson
import rapidjson

from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.tensors import DATATYPES, element_count, pack_bytes, pack_strings, unpack_bytes
from weir.schemas.kserve.json_documents import MAX_JSON_DEPTH, too_deep

_ARRAY_CODES: dict[str, Any] = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}

_PIECE_ELEMENTS = 65_536

_TEXT_FROM_BYTES = 2048
"""orjson writes the elements of an array in half the time that a list of them takes, which is 5 ms for 256 KiB of FP32."""

_SHAPE_MISMATCH = "Unable to parse 'data': Shape does not match true shape of 'data' field"


def pack_json_data(name: str, datatype: str, data: Any, count: int) -> bytes:
    """The content of input `name`, of `count` elements, from the JSON value of its `data`: an array, nested anyhow.

    How many strings a BYTES input has is left for `RequestNormalizer` to check, as in Triton. Raises WeirError:
    INTERNAL for a wrong JSON type or count, INVALID_ARG for a datatype that can't travel as JSON.
    """
    if type(data) is not list:
        raise internal("Unable to parse 'data': attempt to access JSON non-array as array")
    if datatype == "BYTES":
        return _pack_strings(data)
    code = _ARRAY_CODES.get(datatype)
    if code is None:
        raise _not_for_json(name, datatype)
    elements, types = _flatten(data)
    _check_types(datatype, types)
    if len(elements) != count:
        raise internal(_SHAPE_MISMATCH)
    if code == "?":
        return bytes(elements)
    try:
        return array(code, elements).tobytes()
    except OverflowError:
        return _truncated(datatype, elements)


def json_data(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Any:
    """The flat `data` of output `name`, as a value orjson writes.

    Bytes of a BYTES element that are not UTF-8 become U+FFFD, since the response must stay JSON: such content needs the
    binary format. Raises WeirError: INTERNAL where the content does not fill `shape`, INVALID_ARG for FP16 and BF16.
    """
    if datatype == "BYTES":
        return [element.decode(errors="replace") for element in _strings(name, shape, data)]
    if len(data) >= _TEXT_FROM_BYTES:
        return orjson.Fragment(b"".join(json_pieces(name, datatype, shape, data)))
    code = _checked_code(name, datatype, shape, data)
    if not data:
        return []
    values = memoryview(data).cast(code).tolist()
    # A NaN or an infinity anywhere makes the sum one; orjson would write it as null.
    if code in "fd" and not math.isfinite(sum(values)):
        return orjson.Fragment(rapidjson.dumps(values, number_mode=rapidjson.NM_NAN))
    return values


def json_pieces(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Iterator[bytes]:
    """The JSON text of `json_data` in pieces, made one after another: for content that is too long to be a list at once.

    Raises WeirError as `json_data`, before the first piece.
    """
    if datatype == "BYTES":
        elements = _strings(name, shape, data)
        return _joined(
            orjson.dumps([element.decode(errors="replace") for element in elements[start : start + _PIECE_ELEMENTS]])
            for start in range(0, len(elements), _PIECE_ELEMENTS)
        )
    _checked_code(name, datatype, shape, data)
    values = np.frombuffer(data, DATATYPES[datatype].numpy)
    pieces = (values[start : start + _PIECE_ELEMENTS] for start in range(0, len(values), _PIECE_ELEMENTS))
    if values.dtype.kind != "f":
        return _joined(orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY) for piece in pieces)
    if not np.isfinite(values).all():
        return _joined(rapidjson.dumps(piece.tolist(), number_mode=rapidjson.NM_NAN).encode() for piece in pieces)
    return _joined(orjson.dumps(piece.astype(np.float64), option=orjson.OPT_SERIALIZE_NUMPY) for piece in pieces)


def json_scalar(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Any:
    """As `json_data`, for an output of one element: that element."""
    values = json_data(name, datatype, shape, data)
    if isinstance(values, list):
        return values[0]
    return orjson.Fragment(
        rapidjson.dumps(memoryview(data).cast(_ARRAY_CODES[datatype])[0], number_mode=rapidjson.NM_NAN)
    )


def _flatten(data: list[Any]) -> tuple[list[Any], set[type]]:
    """(the elements of `data` without its nesting, their types)."""
    types, depth = set(map(type, data)), 1
    while types == {list} and depth < MAX_JSON_DEPTH:  # a level at once takes a third of the time of list after list
        data = list(chain.from_iterable(data))
        types, depth = set(map(type, data)), depth + 1
    if list not in types:
        return data, types
    elements: list[Any] = []
    _flatten_into(elements, data, depth)
    return elements, set(map(type, elements))


def _flatten_into(elements: list[Any], data: list[Any], depth: int) -> None:
    if depth > MAX_JSON_DEPTH:
        raise too_deep()
    if list not in set(map(type, data)):
        elements.extend(data)
        return
    for item in data:
        if type(item) is list:
            _flatten_into(elements, item, depth + 1)
        else:
            elements.append(item)


def _check_types(datatype: str, types: set[type]) -> None:
    if datatype == "BOOL":
        if not types <= {bool}:
            raise internal("Unable to parse 'data': attempt to access JSON non-boolean as boolean")
    elif datatype in ("FP32", "FP64"):
        if not types <= {int, float}:
            raise internal("Unable to parse 'data': attempt to access JSON non-number as double")
    elif not types <= {int}:
        raise _not_an_integer(datatype)


def _pack_strings(data: list[Any]) -> bytes:
    strings, types = _flatten(data)
    if not types <= {str, bytes}:  # bytes come from msgpack, which distinguishes them from text
        raise internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    return pack_bytes(strings) if bytes in types else pack_strings(strings)


def _truncated(datatype: str, elements: list[int]) -> bytes:
    """Integers of which some do not fit `datatype`, each cut to its width; beyond 64 bits they are no integers."""
    try:
        wide = array("Q" if datatype.startswith("U") else "q", elements)
    except OverflowError:
        raise _not_an_integer(datatype) from None
    return np.frombuffer(wide, wide.typecode).astype(DATATYPES[datatype].numpy).tobytes()


def _checked_code(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Any:
    """The code of `array` for an output's elements, which are no strings. Raises WeirError as `json_data`."""
    code = _ARRAY_CODES.get(datatype)
    if code is None:
        raise invalid(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    if len(data) != element_count(shape) * DATATYPES[datatype].size_bytes:
        raise _wrong_size(name)
    return code


def _joined(texts: Iterable[bytes]) -> Iterator[bytes]:
    """One JSON array of the elements of several, of which none is empty."""
    separator = b"["
    for text in texts:
        yield separator
        yield text[1:-1]
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _strings(name: str, shape: Sequence[int], data: bytes | memoryview) -> list[bytes]:
    try:
        elements = unpack_bytes(data)
    except ValueError:
        raise _wrong_size(name) from None
    if len(elements) != element_count(shape):
        raise _wrong_size(name)
    return elements


def _not_for_json(name: str, datatype: str) -> WeirError:
    if datatype not in DATATYPES:
        return invalid(f"invalid datatype for input {name}")
    return invalid(
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
    )


def _not_an_integer(datatype: str) -> WeirError:
    kind = "unsigned-integer" if datatype.startswith("U") else "signed-integer"
    return internal(f"Unable to parse 'data': attempt to access JSON non-{kind} as {kind}")


def _wrong_size(name: str) -> WeirError:
    return internal(f"output tensor shape does not match size of output for '{name}'")
