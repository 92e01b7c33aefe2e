"""Parquet: each row is an item, each column an input; scalars, lists and lists of lists.

Converts Arrow columns to tensors row by row, and tensors to columns. pyarrow is imported on first use.

`ParquetShards`: a row for each item, with columns `item`, `source`, `error`, and one for each output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, BinaryIO

import numpy as np

from weir.jobs.formats.input_files import InputFile, open_regular, printable_name, unreadable_file
from weir.jobs.formats.items import MAX_ITEM_BYTES, DeclaredInput, ItemResult, JobItem, check_names
from weir.jobs.formats.jsonl import from_bf16, to_bf16
from weir.jobs.formats.shards import OutputColumn, WholeShards, columns_of, text_of
from weir.schemas.config.model_config import ModelOutput
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, Tensor, pack_bytes, unpack_bytes

BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 4096


class ParquetFile:
    """One Parquet file. Reads the schema at once; raises WeirError unless it matches the model."""

    def __init__(self, file: InputFile, inputs: dict[str, DeclaredInput]) -> None:
        self._file = file
        self._name = printable_name(file.name)
        with self._reading() as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
            check_names(schema.names, inputs, f"'{self._name}': column")
            self._inputs = [inputs[name] for name in schema.names]
            for declared in self._inputs:
                what = f"'{self._name}': column '{declared.name}'"
                depth = check_column(schema.field(declared.name).type, declared.datatype, what)
                if depth > 1 and depth not in (len(declared.dims), len(declared.dims) + declared.has_batch):
                    raise invalid(f"{what} nests {depth} lists, but the input's dims are {list(declared.dims)}")
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            self._ends = list(accumulate(group.num_rows for group in groups))
            self._batch_rows = [
                max(1, min(MAX_BATCH_ROWS, BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)))
                for group in groups
            ]

    def count(self) -> int:
        """Implements `ItemFile`."""
        return self._ends[-1] if self._ends else 0

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """Implements `ItemFile`. Rows of a group that can't be read become items with errors; the next group is read
        normally.
        """
        offset = first_number - start
        with self._reading() as opened:
            names = [declared.name for declared in self._inputs]
            begin = 0
            for group, end in enumerate(self._ends):
                row = max(begin, start)
                place = begin
                begin = end
                if row >= end:
                    continue
                error = invalid(f"'{self._name}' has changed after its items were counted")
                try:
                    for batch in opened.iter_batches(self._batch_rows[group], [group], names, use_threads=False):
                        last = min(place + len(batch), end)
                        if last > row:
                            for inputs in self._rows_of(batch.slice(row - place)):
                                yield JobItem(row + offset, f"{self._name}[{row}]", inputs)
                                row += 1
                        place += len(batch)
                except (OSError, arrow().ArrowException) as problem:
                    error = invalid(f"'{self._name}' can't be read: {_first_line(problem)}")
                for missing in range(row, end):
                    yield JobItem(missing + offset, f"{self._name}[{missing}]", error)

    def _rows_of(self, batch: Any) -> Iterator[list[Tensor] | WeirError]:
        columns = [self._column(batch.column(place), declared) for place, declared in enumerate(self._inputs)]
        for _ in range(len(batch)):
            tensors: list[Tensor] = []
            problem: WeirError | None = None
            for declared, column in zip(self._inputs, columns, strict=True):
                value = next(column)
                if isinstance(value, WeirError):
                    problem = invalid(f"column '{declared.name}': {value.message}")
                elif value is None:
                    if not declared.optional:
                        problem = invalid(f"column '{declared.name}' is null")
                elif len(value[1]) > MAX_ITEM_BYTES:
                    problem = invalid(f"column '{declared.name}' is larger than {MAX_ITEM_BYTES} bytes")
                else:
                    try:
                        tensors.append(Tensor(declared.name, declared.datatype, declared.shape_of(value[0]), value[1]))
                    except WeirError as error:
                        problem = error
            yield problem or tensors

    def _column(self, column: Any, declared: DeclaredInput) -> Iterator[Row | WeirError | None]:
        """The values of `column`, converted together; one by one if that fails, to find the invalid ones."""
        try:
            # Convert everything before the first value is returned.
            yield from list(rows_of(column, declared.datatype))
            return
        except (arrow().ArrowException, WeirError) as problem:
            if len(column) == 1:
                yield problem if isinstance(problem, WeirError) else invalid(_first_line(problem))
                return
        for place in range(len(column)):
            yield from self._column(column.slice(place, 1), declared)

    def _reading(self) -> _Reading:
        return _Reading(self._file)


class _Reading:
    """An open Parquet file, whose errors are WeirErrors."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._close: Callable[[], None] = lambda: None

    def __enter__(self) -> Any:
        pyarrow = arrow()
        name = printable_name(self._file.name)
        source = open(open_regular(self._file), "rb")
        self._close = source.close
        try:
            return pyarrow.parquet.ParquetFile(source, pre_buffer=False)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            source.close()
            raise invalid(f"'{name}' is not a Parquet file: {_first_line(error)}") from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._close()
        if isinstance(error, OSError):
            raise unreadable_file(self._file.name, error) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


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
    """The module pyarrow. Raises WeirError (UNSUPPORTED) if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise WeirError(
            ErrorCode.UNSUPPORTED, "Parquet needs pyarrow: install Weir with its extra `parquet` (weir-serve[parquet])"
        ) from None
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


def rows_of(column: Any, datatype: str) -> Iterator[Row | WeirError | None]:
    """The values of the Arrow array `column`; None for null, an error for a value that is not a tensor."""
    pyarrow = arrow()
    present = column.is_valid().to_numpy(zero_copy_only=False)
    levels: list[np.ndarray] = []
    count = len(column)
    while pyarrow.types.is_nested(column.type):
        lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        levels.append(np.concatenate([[0], np.cumsum(lengths)]))
        if levels[1:] and column.null_count:
            raise invalid("a list within a list is null")
        column = column.flatten()
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    wanted = element_type(datatype)
    if column.type != wanted:
        column = column.cast(wanted)
    nulls = None if not column.null_count else column.is_null().to_numpy(zero_copy_only=False)
    contents = _ByteContents(column, datatype)
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


class _ByteContents:
    """The elements of a flat Arrow array as the content of tensors."""

    def __init__(self, column: Any, datatype: str) -> None:
        self._strings: list[bytes] | None = None
        self._view = memoryview(b"")
        self._size = DATATYPES[datatype].size_bytes
        if datatype == "BYTES":
            self._strings = column.to_pylist()
            return
        # Nulls, which are rejected elsewhere, would turn integers into floats.
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
    content = b"".join(column.contents)
    if column.datatype == "BYTES":
        flat: Any = pyarrow.array(unpack_bytes(content), pyarrow.binary())
    else:
        elements = np.frombuffer(content, DATATYPES[column.datatype].numpy)
        flat = pyarrow.array(from_bf16(elements) if column.datatype == "BF16" else elements)
    if tuple(dims) == (1,) or not dims:
        # Each value is one element: distribute them over the rows.
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


class ParquetShards(WholeShards):
    """Shards as Parquet files. The outputs of a failed item are null, `error` is null for the others."""

    suffix = ".parquet"
    own_names = ("item", "source", "error")

    def __init__(self, outputs: Sequence[ModelOutput]) -> None:
        super().__init__(outputs)
        pyarrow = arrow()
        fields = [("item", pyarrow.int64()), ("source", pyarrow.string()), ("error", pyarrow.string())]
        fields += [(output.name, _type_of(output)) for output in outputs]
        self._schema = pyarrow.schema(fields)

    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Implements `ShardFormat`."""
        pyarrow = arrow()
        errors: list[WeirError | None] = [None] * len(results)
        columns = columns_of(results, self.outputs, errors, exact=True)
        own = [
            pyarrow.array([result.number for result in results], pyarrow.int64()),
            pyarrow.array([result.source for result in results], pyarrow.string()),
            pyarrow.array([error and text_of(error) for error in errors], pyarrow.string()),
        ]
        arrays = [arrow_column(column, output.dims) for column, output in zip(columns, self.outputs, strict=True)]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(own + arrays, schema=self._schema), file)
        return len(errors) - errors.count(None)

    def failed(self, file: BinaryIO) -> list[int]:
        """Implements `ShardFormat`."""
        table = self._table(file, ["item", "error"])
        numbers: list[int] = table.filter(table.column("error").is_valid()).column("item").to_pylist()
        return numbers

    def read(self, file: BinaryIO) -> list[ItemResult]:
        """Implements `WholeShards`."""
        table = self._table(file, None)
        own = [table.column(name).to_pylist() for name in self.own_names]
        values = [
            [row for chunk in table.column(output.name).chunks for row in rows_of(chunk, _datatype(output))]
            for output in self.outputs
        ]
        results: list[ItemResult] = []
        for place, (number, source, error) in enumerate(zip(*own, strict=True)):
            if error is not None:
                results.append(ItemResult(number, source, None, WeirError(ErrorCode.UNKNOWN, error)))
                continue
            tensors: list[Tensor] = []
            for output, column in zip(self.outputs, values, strict=True):
                row = column[place]
                if isinstance(row, WeirError):
                    raise ValueError(row.message)
                if row is not None:
                    shape = row[0] if len(row[0]) == len(output.dims) else (1,)
                    tensors.append(Tensor(output.name, _datatype(output), shape, row[1]))
            results.append(ItemResult(number, source, tensors, None))
        return results

    def _table(self, file: BinaryIO, names: list[str] | None) -> Any:
        pyarrow = arrow()
        table = pyarrow.parquet.ParquetFile(file, pre_buffer=False).read(names, use_threads=False)
        expected = self._schema if names is None else pyarrow.schema([self._schema.field(name) for name in names])
        if not table.schema.equals(expected):
            raise ValueError("its columns differ")
        return table


def _datatype(output: ModelOutput) -> str:
    return BY_CONFIG_NAME[output.data_type].name


def _type_of(output: ModelOutput) -> Any:
    return column_type(_datatype(output), output.dims)
