"""Parquet: Arrow columns as tensors row by row, and tensors as columns. pyarrow is imported on first use.

`ColumnValues`: a column of scalars, lists or lists of lists as the contents of tensors. `weir.jobs.formats.parquet_rows`
reads the items of a file with it.

`ParquetShards`: a row for each item, with columns `item`, `source`, `error`, and one for each output.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np

from weir.jobs.formats.items import ItemResult, KeptColumn
from weir.jobs.formats.jsonl import from_bf16, to_bf16
from weir.jobs.formats.shards import LARGE_SHARD_BYTES, OutputColumn, ShardFormat, columns_of, text_of
from weir.runtime.extras import missing_extra
from weir.schemas.config.model_config import ModelOutput
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, unpack_bytes

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

_REPEATED = tuple(name for name in _NAMES if name not in ("BF16", "BYTES"))

STRING_LENGTH = struct.Struct("<I")
"""The length before each element of BYTES content."""

Row = tuple[tuple[int, ...], bytes | memoryview]
"""(shape, content) of one value."""

_Range = tuple[tuple[int, ...], int, int]
"""(shape, first and end of the elements) of one value."""


def arrow() -> Any:
    """The module pyarrow. Raises WeirError (UNSUPPORTED) if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise WeirError(ErrorCode.UNSUPPORTED, missing_extra("Parquet", "parquet")) from None
    return pyarrow


def element_type(datatype: str) -> Any:
    """The Arrow type of elements of `datatype`; float32 for BF16, which Arrow does not have."""
    return getattr(arrow(), _NAMES[datatype])()


def check_column(type: Any, datatype: str, what: str) -> int:
    """The nesting depth of lists in a column of `type`. Raises WeirError unless its elements are of `datatype`."""
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


def kept_datatype(type: Any, what: str) -> str:
    """The datatype of a column that results repeat: BYTES, as text, for what is neither a number nor a boolean, such as a
    time. Raises WeirError for a column of bytes, lists or structures, which are no text.
    """
    types = arrow().types
    found = type.value_type if types.is_dictionary(type) else type
    if types.is_nested(found) or _is_binary(types, found):
        raise invalid(f"{what} holds {type}, and results repeat numbers, booleans, text and times only")
    return next((name for name in _REPEATED if found == element_type(name)), "BYTES")


def as_text(column: Any) -> Any:
    """`column` with times, decimals and their like as text, which no input takes; others as they are."""
    pyarrow, type = arrow(), column.type
    is_temporal = pyarrow.types.is_temporal(type) or pyarrow.types.is_decimal(type)
    return column.cast(pyarrow.string()) if is_temporal else column


class ColumnValues:
    """The values of the Arrow array `column` as contents of tensors of `datatype`, one for each row.

    Converts numbers at once, and strings when they are asked for: a dictionary of one large string is not repeated for
    each row. Raises WeirError or ArrowException where the column can't be converted, MemoryError where memory is short.
    """

    def __init__(self, column: Any, datatype: str) -> None:
        pyarrow = arrow()
        self._present: list[bool] = column.is_valid().to_pylist()
        self._levels: list[np.ndarray] = []
        while pyarrow.types.is_nested(column.type):
            lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            self._levels.append(np.concatenate([[0], np.cumsum(lengths)]))
            if self._levels[1:] and column.null_count:
                raise invalid("a list within a list is null")
            column = column.flatten()
        self._nulls = None if not column.null_count else column.is_null().to_numpy(zero_copy_only=False)
        self._contents = (_Strings if datatype == "BYTES" else _Numbers)(column, datatype)
        self._offsets: list[int] = self._levels[0].tolist() if len(self._levels) == 1 else []

    def __len__(self) -> int:
        return len(self._present)

    def value(self, place: int, most_bytes: int | None = None) -> Row | WeirError | None:
        """The value of row `place`: None for null, an error for one that is not a tensor.

        Raises ItemTooLarge, before it is made, for a content of more than `most_bytes`; MemoryError.
        """
        if not self._present[place]:
            return None
        shape: tuple[int, ...]
        if not self._levels:
            shape, begin, end = (), place, place + 1
        elif self._offsets:
            begin, end = self._offsets[place], self._offsets[place + 1]
            shape = (end - begin,)
        else:
            found = _range(self._levels, place)
            if isinstance(found, WeirError):
                return found
            shape, begin, end = found
        if self._nulls is not None and self._nulls[begin:end].any():
            return invalid("a value within a list is null")
        if most_bytes is not None and self._contents.size_bytes(begin, end) > most_bytes:
            raise ItemTooLarge
        return shape, self._contents.between(begin, end)


class ItemTooLarge(Exception):
    """A value has more bytes than asked for."""


def _range(levels: Sequence[np.ndarray], place: int) -> _Range | WeirError:
    """The elements of the value at `place`; its lists must have equal lengths at each level."""
    begin, end = place, place + 1
    shape: list[int] = []
    for offsets in levels:
        lengths = np.diff(offsets[begin : end + 1])
        if not len(lengths):
            shape.append(0)
            continue
        if (lengths != lengths[0]).any():
            return invalid("lists of unequal lengths are not a tensor")
        shape.append(int(lengths[0]))
        begin, end = int(offsets[begin]), int(offsets[end])
    return tuple(shape), begin, end


class _Contents(Protocol):
    """The elements of a flat Arrow array as the content of tensors."""

    def __init__(self, column: Any, datatype: str) -> None: ...

    def size_bytes(self, begin: int, end: int) -> int:
        """Bytes of the content of the elements from `begin` to `end`."""
        ...

    def between(self, begin: int, end: int) -> bytes | memoryview:
        """The content of the elements from `begin` to `end`."""
        ...


class _Numbers(_Contents):
    def __init__(self, column: Any, datatype: str) -> None:
        if arrow().types.is_dictionary(column.type):
            column = column.dictionary_decode()
        wanted = element_type(datatype)
        if column.type != wanted:
            column = column.cast(wanted)
        # Nulls, which are rejected elsewhere, would turn integers into floats.
        filled = column.fill_null(False if datatype == "BOOL" else 0) if column.null_count else column
        array = np.ascontiguousarray(filled.to_numpy(zero_copy_only=False), None)
        if datatype == "BF16":
            array = to_bf16(array)
        self._size = DATATYPES[datatype].size_bytes
        self._view = memoryview(array.view(np.uint8).data) if array.size else memoryview(b"")

    def size_bytes(self, begin: int, end: int) -> int:
        return (end - begin) * self._size

    def between(self, begin: int, end: int) -> bytes | memoryview:
        return self._view[begin * self._size : end * self._size]


class _Strings(_Contents):
    """Strings, of which each is copied only into the content that it is part of."""

    def __init__(self, column: Any, datatype: str) -> None:
        pyarrow = arrow()
        self._places: memoryview | None = None
        if pyarrow.types.is_dictionary(column.type):
            places = column.indices.fill_null(0).cast(pyarrow.int64()).to_numpy(zero_copy_only=False)
            self._places = memoryview(places.data)
            column = column.dictionary
        column = column.cast(element_type(datatype))
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets or bytes(8), np.int64)[column.offset : column.offset + len(column) + 1]
        self._ends = memoryview(ends.data)
        self._data = memoryview(data or b"").cast("B")
        self._sums: memoryview | None = None
        if self._places is not None:
            lengths = np.diff(ends)[places] if len(places) else np.zeros(0, np.int64)
            self._sums = memoryview(np.concatenate([[0], np.cumsum(lengths)]).data)

    def size_bytes(self, begin: int, end: int) -> int:
        ends = self._ends if self._sums is None else self._sums
        size: int = ends[end] - ends[begin] + STRING_LENGTH.size * (end - begin)
        return size

    def between(self, begin: int, end: int) -> bytes | memoryview:
        if end - begin == 1:
            element = self._element(begin)
            return b"".join((STRING_LENGTH.pack(len(element)), element))
        content, at = bytearray(self.size_bytes(begin, end)), 0
        for place in range(begin, end):
            element = self._element(place)
            STRING_LENGTH.pack_into(content, at, len(element))
            at += STRING_LENGTH.size
            content[at : at + len(element)] = element
            at += len(element)
        return memoryview(content).toreadonly()

    def _element(self, place: int) -> memoryview:
        place = place if self._places is None else self._places[place]
        return self._data[self._ends[place] : self._ends[place + 1]]


def column_type(datatype: str, dims: Sequence[int]) -> Any:
    """The Arrow type of the column of an output: a scalar for dims [1], else lists nested by dims."""
    pyarrow = arrow()
    found = pyarrow.binary() if datatype == "BYTES" else element_type(datatype)
    for _ in () if tuple(dims) == (1,) else dims:
        found = pyarrow.list_(found)
    return found


def arrow_column(column: OutputColumn, dims: Sequence[int]) -> Any:
    """The Arrow array of `column`, whose values have as many dimensions as `dims`; null for a missing value."""
    pyarrow = arrow()
    kind = column_type(column.datatype, dims)
    absent = np.array([shape is None for shape in column.shapes], np.bool_)
    if column.datatype == "BYTES":
        strings = [element for content in column.contents for element in unpack_bytes(content)]
        flat: Any = pyarrow.array(strings, pyarrow.binary())
        del strings
    else:
        elements = np.frombuffer(b"".join(column.contents), DATATYPES[column.datatype].numpy)
        flat = pyarrow.array(from_bf16(elements) if column.datatype == "BF16" else elements)
    if tuple(dims) == (1,) or not dims:
        # Each value is one element: distribute them over the rows.
        if not absent.any():
            return flat.cast(kind)
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


class ParquetShards(ShardFormat):
    """Shards as Parquet files. The outputs of a failed item are null, `error` is null for the others. The columns that
    results repeat come before the outputs.
    """

    suffix = ".parquet"
    own_names = ("item", "source", "error")

    def __init__(self, outputs: Sequence[ModelOutput], kept: Sequence[KeptColumn] = ()) -> None:
        super().__init__(outputs)
        pyarrow = arrow()
        self._kept = kept
        taken = {*self.own_names, *(output.name for output in outputs)}
        for column in kept:
            if column.name in taken:
                raise invalid(f"column '{column.name}' can't be repeated: results have another one of this name")
        fields = [("item", pyarrow.int64()), ("source", pyarrow.string()), ("error", pyarrow.string())]
        fields += [(column.name, _kept_type(column)) for column in kept]
        fields += [(output.name, _type_of(output)) for output in outputs]
        self._schema = pyarrow.schema(fields)

    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Implements `ShardFormat`."""
        return self._write(file, self._table(results))

    def failed(self, file: BinaryIO) -> list[int]:
        """Implements `ShardFormat`."""
        table = self._read(file, ["item", "error"])
        numbers: list[int] = table.filter(table.column("error").is_valid()).column("item").to_pylist()
        return numbers

    def replace(self, old: BinaryIO, new: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Implements `ShardFormat`."""
        pyarrow, before, after = arrow(), self._read(old, None), self._table(results)
        is_replaced = pyarrow.compute.is_in(before.column("item"), after.column("item"))
        kept = before.filter(pyarrow.compute.invert(is_replaced))
        return self._write(new, pyarrow.concat_tables([kept, after]).sort_by("item"))

    def _table(self, results: Sequence[ItemResult]) -> Any:
        pyarrow = arrow()
        errors: list[WeirError | None] = [None] * len(results)
        columns = columns_of(results, self.outputs, errors, exact=True)
        own = [
            pyarrow.array([result.number for result in results], pyarrow.int64()),
            pyarrow.array([result.source for result in results], pyarrow.string()),
            pyarrow.array([error and text_of(error) for error in errors], pyarrow.string()),
        ]
        kept = [_kept_array(column, results) for column in self._kept]
        arrays = [arrow_column(column, output.dims) for column, output in zip(columns, self.outputs, strict=True)]
        return pyarrow.Table.from_arrays(own + kept + arrays, schema=self._schema)

    def _write(self, file: BinaryIO, table: Any) -> int:
        # A dictionary and the least and largest value of large ones are copies of them, up to six in all.
        has_small = table.nbytes <= LARGE_SHARD_BYTES
        arrow().parquet.write_table(table, file, use_dictionary=has_small, write_statistics=has_small)
        errors = table.column("error")
        failures: int = len(errors) - errors.null_count
        return failures

    def _read(self, file: BinaryIO, names: list[str] | None) -> Any:
        pyarrow = arrow()
        table = pyarrow.parquet.ParquetFile(file, pre_buffer=False).read(names, use_threads=False)
        expected = self._schema if names is None else pyarrow.schema([self._schema.field(name) for name in names])
        if not table.schema.equals(expected):
            raise ValueError("its columns differ")
        return table


def _kept_type(column: KeptColumn) -> Any:
    return arrow().string() if column.datatype == "BYTES" else element_type(column.datatype)


def _kept_array(kept: KeptColumn, results: Sequence[ItemResult]) -> Any:
    """The Arrow array of the values of a column that results repeat; null for a result without one."""
    column = OutputColumn(kept.name, kept.datatype, (1,), len(results), True)
    for place, result in enumerate(results):
        for tensor in result.kept:
            if tensor.name == kept.name:
                column.put(place, tensor)
    return arrow_column(column, (1,)).cast(_kept_type(kept))


def _datatype(output: ModelOutput) -> str:
    return BY_CONFIG_NAME[output.data_type].name


def _type_of(output: ModelOutput) -> Any:
    return column_type(_datatype(output), output.dims)
