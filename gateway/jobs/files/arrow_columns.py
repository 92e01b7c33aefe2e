"""Columns of Arrow as tensors, row by row, and tensors as columns. pyarrow is imported only where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gateway.jobs.files.json_values import from_bf16, to_bf16
from gateway.jobs.files.output_columns import OutputColumn
from schemas.datatypes import DATATYPES
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.tensors import pack_bytes, unpack_bytes

_NAMES = {
    "BOOL": "bool_",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "float32",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "large_binary",
}

Row = tuple[tuple[int, ...], bytes | memoryview]
"""(shape, content) of one value."""

_Range = tuple[tuple[int, ...], int, int]
"""(shape, first and end of the elements) of one value."""


def arrow() -> Any:
    """Pyarrow. Raises WeirError (UNSUPPORTED) where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise WeirError(
            ErrorCode.UNSUPPORTED, "Parquet needs pyarrow: install Weir with its extra `parquet` (weir-serve[parquet])"
        ) from None
    return pyarrow


def element_type(datatype: str) -> Any:
    """The Arrow type of elements of `datatype`; that of BF16, which Arrow lacks, is float32."""
    return getattr(arrow(), _NAMES[datatype])()


def check_column(type: Any, datatype: str, what: str) -> int:
    """How deep the lists of a column of `type` nest, whose elements are to be of `datatype`. Raises WeirError."""
    types = arrow().types
    found, depth = type, 0
    while types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found):
        found, depth = found.value_type, depth + 1
    if types.is_dictionary(found):
        found = found.value_type
    if datatype == "BYTES":
        fits = types.is_string(found) or types.is_large_string(found) or _is_binary(types, found)
    elif datatype == "BOOL":
        fits = types.is_boolean(found)
    elif DATATYPES[datatype].numpy.kind == "f" or datatype == "BF16":
        fits = types.is_floating(found) or types.is_integer(found)
    else:
        fits = types.is_integer(found)
    if not fits:
        raise invalid(f"{what} holds {type}, but the input is {datatype}")
    return depth


def rows_of(column: Any, datatype: str) -> Iterator[Row | WeirError | None]:
    """Each value of the Arrow array `column`; None for null, an error for one that is no tensor or does not fit."""
    pyarrow = arrow()
    present = column.is_valid().to_numpy(zero_copy_only=False)
    levels: list[np.ndarray] = []
    count = len(column)
    while pyarrow.types.is_nested(column.type):
        lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        levels.append(np.concatenate([[0], np.cumsum(lengths)]))
        if levels[1:] and column.null_count:
            raise invalid("lists within lists are null")
        column = column.flatten()
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    wanted = element_type(datatype)
    if column.type != wanted:
        column = column.cast(wanted)
    nulls = None if not column.null_count else column.is_null().to_numpy(zero_copy_only=False)
    contents = _Contents(column, datatype)
    ranges: list[_Range | WeirError]
    if len(levels) == 1:
        ranges = [((end - begin,), begin, end) for begin, end in pairwise(levels[0].tolist())]
    else:
        ranges = [_range(levels, place) for place in range(count)]
    for place, found in enumerate(ranges):
        if not present[place]:
            yield None
        elif isinstance(found, WeirError):
            yield found
        elif nulls is not None and nulls[found[1] : found[2]].any():
            yield invalid("a value within a list is null")
        else:
            yield found[0], contents.between(found[1], found[2])


def _range(levels: Sequence[np.ndarray], place: int) -> _Range | WeirError:
    """Where the value at `place` is; its lists must be of the same lengths at each level."""
    begin, end = place, place + 1
    shape: list[int] = []
    for offsets in levels:
        lengths = np.diff(offsets[begin : end + 1])
        if not len(lengths):
            shape.append(0)
            continue
        if (lengths != lengths[0]).any():
            return invalid("lists of unequal lengths are no tensor")
        shape.append(int(lengths[0]))
        begin, end = int(offsets[begin]), int(offsets[end])
    return tuple(shape), begin, end


class _Contents:
    """The elements of a flat Arrow array as the content of tensors."""

    def __init__(self, column: Any, datatype: str) -> None:
        self._strings: list[bytes] | None = None
        self._view = memoryview(b"")
        self._size = DATATYPES[datatype].size_bytes
        if datatype == "BYTES":
            self._strings = column.to_pylist()
            return
        # Nulls, which are refused where they stand, would make integers floats.
        filled = column.fill_null(False if datatype == "BOOL" else 0) if column.null_count else column
        array = np.ascontiguousarray(filled.to_numpy(zero_copy_only=False), None)
        if datatype == "BF16":
            array = to_bf16(array)
        self._view = memoryview(array.view(np.uint8).data) if array.size else memoryview(b"")

    def between(self, begin: int, end: int) -> bytes | memoryview:
        """The content of the elements from `begin` to `end`."""
        if self._strings is not None:
            return pack_bytes(self._strings[begin:end])
        return self._view[begin * self._size : end * self._size]


def column_type(datatype: str, dims: Sequence[int]) -> Any:
    """The Arrow type of an output's column: a scalar for dims [1], else lists nested as often as there are dims."""
    pyarrow = arrow()
    found = pyarrow.binary() if datatype == "BYTES" else element_type(datatype)
    for _ in () if tuple(dims) == (1,) else dims:
        found = pyarrow.list_(found)
    return found


def arrow_column(column: OutputColumn, dims: Sequence[int]) -> Any:
    """The Arrow array of `column`, whose values all have as many dimensions as `dims`; null where there is none."""
    pyarrow = arrow()
    kind = column_type(column.datatype, dims)
    absent = np.array([shape is None for shape in column.shapes], np.bool_)
    content = b"".join(column.contents)
    if column.datatype == "BYTES":
        flat: Any = pyarrow.array(unpack_bytes(content), pyarrow.binary())
    else:
        elements = np.frombuffer(content, DATATYPES[column.datatype].numpy)
        flat = pyarrow.array(from_bf16(elements) if column.datatype == "BF16" else elements)
    if tuple(dims) == (1,) or not dims:
        # Each value that is there is one element: spread them over the places.
        places = np.cumsum(~absent) - 1
        return flat.take(pyarrow.array(places, mask=absent)).cast(kind)
    shapes = [shape for shape in column.shapes if shape is not None]
    types = [kind]
    while len(types) < len(dims):
        types.append(types[-1].value_type)
    for level in reversed(range(len(dims))):
        if level:
            lengths = [shape[level] for shape in shapes for _ in range(int(np.prod(shape[:level])))]
            flat = pyarrow.ListArray.from_arrays(_offsets(lengths), flat, type=types[level])
        else:
            lengths = [0 if shape is None else shape[0] for shape in column.shapes]
            mask = pyarrow.array(absent) if absent.any() else None
            flat = pyarrow.ListArray.from_arrays(_offsets(lengths), flat, type=kind, mask=mask)
    return flat


def _offsets(lengths: list[int]) -> Any:
    return arrow().array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))


def _is_binary(types: Any, type: Any) -> bool:
    return bool(types.is_binary(type) or types.is_large_binary(type) or types.is_fixed_size_binary(type))
