"""`ParquetRows`: the items in an open Parquet file, read within a limit of memory. Pure decoding, without a process.

A small file may expand to any size: a page, a value or a dictionary can't be read in parts, and footers may lie. What can't
fit by the footer is refused before it is read. The rest is read in batches of rows, which become smaller where memory does
not suffice; a row that doesn't fit alone ends its row group. The limit itself is the caller's: an allocation beyond it must
raise MemoryError (`weir.jobs.formats.parquet_process`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from weir.jobs.formats.items import MAX_ITEM_BYTES, DeclaredInput, KeptColumn, check_names
from weir.jobs.formats.parquet import (
    STRING_LENGTH,
    ColumnValues,
    ItemTooLarge,
    Row,
    arrow,
    as_text,
    check_column,
    kept_datatype,
)
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.tensors import Tensor

BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 4096

READ_BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read from the file at a time, or a page, if that is larger."""

READ_MEMORY_BYTES = 320 << 20
"""Memory for reading a Parquet file. A row that needs more ends its row group with an error."""

MAX_FOOTER_BYTES = 16 << 20
"""A larger footer is refused: its description of a column takes 2 bytes at least, and in memory some hundreds."""

MAX_ROW_GROUPS = 32_767
"""The most that the format numbers (`ordinal`, 16 bits). A file that has more is refused."""

MAX_ROWS = 1_000_000_000
"""Rows of one file. A file whose footer claims more is refused."""

MAX_DECODED_BYTES = 64 << 30
MAX_EXPANSION = 4096
"""The rows of a file may have `MAX_DECODED_BYTES` in all, and `MAX_EXPANSION` times the size of the file. Those after that
are errors: 200 000 rows that name the same string of 30 MB take 2 kB in a file, and 6 TB as items.
"""

_SMALLER = 8
"""Batches become smaller by this factor where memory does not suffice."""


class FailedRows(NamedTuple):
    """The rows from the current one up to `end`, which can't be read because of `error`."""

    end: int
    error: WeirError


RowEvent = list[Tensor] | WeirError | FailedRows
"""The tensors of a row, the error of a row, or that of several rows."""


class ParquetRows:
    """The rows of the Parquet file with descriptor `fd`, which the caller closes; errors call the file `name`.

    Reads the footer at once; raises WeirError unless it matches `inputs`. `memory_bytes` is what reading may take. Of the
    columns, `columns` are read, by default all; `kept` are those that are no input: each row has its values of them too.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        inputs: Mapping[str, DeclaredInput],
        memory_bytes: int = READ_MEMORY_BYTES,
        columns: Sequence[str] = (),
    ) -> None:
        pyarrow = arrow()
        self._name = name
        self._memory_bytes = memory_bytes
        self._too_much = f"more than the {memory_bytes >> 20} MiB of memory for reading a Parquet file"
        try:
            size_bytes = os.fstat(fd).st_size
            self._most_bytes = MAX_DECODED_BYTES + MAX_EXPANSION * size_bytes
            self._check_footer_size(os.pread(fd, 8, max(size_bytes - 8, 0)), size_bytes)
            self._opened = pyarrow.parquet.ParquetFile(
                pyarrow.OSFile(f"/proc/self/fd/{fd}"), pre_buffer=False, buffer_size=READ_BUFFER_BYTES
            )
            schema, self._metadata = self._opened.schema_arrow, self._opened.metadata
            self._ends = self._row_group_ends()
        except MemoryError:
            raise self._too_large_footer() from None
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if "bad_alloc" in str(error):
                raise self._too_large_footer() from None
            raise invalid(f"'{name}' is not a Parquet file: {_first_line(error)}") from None
        self._leaves = self._leaves_of(schema)
        self.kept = self._kept(schema, inputs, columns)
        added = {column.name: DeclaredInput(column.name, column.datatype, (1,), optional=True) for column in self.kept}
        self._check_columns(schema, inputs, columns)
        read = {**inputs, **added}
        self._inputs = [read[name] for name in schema.names if not columns or name in columns]

    @property
    def inputs(self) -> list[DeclaredInput]:
        """The inputs of the columns, in their order in the file."""
        return self._inputs

    def count(self) -> int:
        """The number of rows by the footer."""
        return self._ends[-1] if self._ends else 0

    def rows(self, start: int, given_up: WeirError | None = None) -> Iterator[RowEvent]:
        """The rows from number `start` on. Those of a group that can't be read are errors; the next group is read normally.

        With `given_up`, nothing more is read of the group of row `start`: its rows have this error. Raises WeirError where
        the rest of the file can't be read.
        """
        begin = decoded_bytes = 0
        for group, end in enumerate(self._ends):
            row = max(begin, start)
            if row < end:
                error = self._refused(group, end - begin) if given_up is None else given_up
                given_up = None
                for event in self._of_group(group, begin, row, end) if error is None else ():
                    row += 1
                    if isinstance(event, list):
                        for tensor in event:
                            decoded_bytes += tensor.size_bytes
                            del tensor
                    yield event
                    del event  # or it would be held while the next row is made
                    if decoded_bytes > self._most_bytes:
                        raise invalid(
                            f"'{self._name}': the rows up to {row - 1} have {decoded_bytes} bytes, and a file of this "
                            f"size may have {self._most_bytes}: distribute them over several files"
                        )
                if error is not None:
                    yield FailedRows(end, error)
            begin = end

    def _check_footer_size(self, tail: bytes, file_bytes: int) -> None:
        size_bytes = int.from_bytes(tail[:4], "little")
        if tail[4:] in (b"PAR1", b"PARE") and MAX_FOOTER_BYTES < size_bytes < file_bytes:
            raise invalid(
                f"'{self._name}' has a footer of {size_bytes} bytes, and {MAX_FOOTER_BYTES} are allowed: "
                "write larger row groups, or several files"
            )

    def _too_large_footer(self) -> WeirError:
        return invalid(
            f"'{self._name}': its footer takes {self._too_much}: write fewer columns and row groups, or several files"
        )

    def _leaves_of(self, schema: Any) -> dict[str, list[int]]:
        """The places of the columns of the file that make up each column of `schema`: several for a structure."""
        names: list[str] = schema.names
        if len(set(names)) != len(names):
            raise invalid(f"'{self._name}': columns have the same name")
        leaves: dict[str, list[int]] = {}
        at = 0
        for place, name in enumerate(names):
            count = _leaf_count(schema.field(place).type)
            leaves[name] = list(range(at, at + count))
            at += count
        return leaves

    def _kept(self, schema: Any, inputs: Mapping[str, DeclaredInput], columns: Sequence[str]) -> list[KeptColumn]:
        """The columns of `columns` that are no input."""
        kept: list[KeptColumn] = []
        for name in columns:
            if name not in self._leaves:
                raise invalid(f"'{self._name}' has no column '{name}'; its columns are {sorted(self._leaves)}")
            if name not in inputs:
                kept.append(
                    KeptColumn(name, kept_datatype(schema.field(name).type, f"'{self._name}': column '{name}'"))
                )
        return kept

    def _check_columns(self, schema: Any, inputs: Mapping[str, DeclaredInput], columns: Sequence[str]) -> None:
        names: list[str] = [name for name in schema.names if not columns or (name in columns and name in inputs)]
        choice = ",".join([*inputs, *(name for name in names if name not in inputs)])
        advice = f". Choose the columns to read (--columns={choice}): results repeat those that are no input"
        check_names(names, dict(inputs), f"'{self._name}': column", advice)
        for name in names:
            declared, what = inputs[name], f"'{self._name}': column '{name}'"
            depth = check_column(schema.field(name).type, declared.datatype, what)
            if depth > 1 and depth not in (len(declared.dims), len(declared.dims) + declared.has_batch):
                raise invalid(f"{what} nests {depth} lists, but the input's dims are {list(declared.dims)}")

    def _row_group_ends(self) -> list[int]:
        count = self._metadata.num_row_groups
        if count > MAX_ROW_GROUPS:
            raise invalid(f"'{self._name}' has {count} row groups, and {MAX_ROW_GROUPS} are allowed: write larger ones")
        counts = [self._metadata.row_group(group).num_rows for group in range(count)]
        ends = list(accumulate(counts))
        if min(counts, default=0) < 0:
            raise invalid(f"'{self._name}' is not a Parquet file: a row group has {min(counts)} rows")
        if ends and ends[-1] > MAX_ROWS:
            raise invalid(f"'{self._name}' has {ends[-1]} rows, and {MAX_ROWS} are allowed: write several files")
        return ends

    def _sizes(self, group: int) -> tuple[int, int]:
        """(bytes of the content of all items, bytes of all pages) of a row group by the footer, which may lie."""
        facts = self._metadata.row_group(group)
        expected = sum(map(len, self._leaves.values()))
        if facts.num_columns != expected:
            raise ValueError(f"row group {group} has {facts.num_columns} columns, but the schema has {expected}")
        item_bytes = page_bytes = 0
        for declared in self._inputs:
            (place,) = self._leaves[declared.name]
            column = facts.column(place)
            item_bytes += column.num_values * (declared.size_bytes or STRING_LENGTH.size)
            page_bytes += column.total_uncompressed_size
        return item_bytes, page_bytes

    def _refused(self, group: int, rows: int) -> WeirError | None:
        """Why the rows of a group can't fit, by the footer; None where they may."""
        where = f"'{self._name}': row group {group}"
        try:
            item_bytes, page_bytes = self._sizes(group)
        except (OSError, ValueError, arrow().ArrowException) as error:
            return self._unreadable(error)
        if item_bytes > rows * MAX_ITEM_BYTES:
            return invalid(
                f"{where} has {item_bytes // rows} bytes of values in a row, and an item may have {MAX_ITEM_BYTES}"
            )
        if page_bytes > rows * self._memory_bytes:
            return invalid(f"{where} has rows of {page_bytes // rows} bytes, {self._too_much}: write smaller values")
        return None

    def _of_group(self, group: int, begin: int, row: int, end: int) -> Iterator[RowEvent]:
        """The rows from `row` on of a group that has the rows from `begin` to `end`."""
        names = [declared.name for declared in self._inputs]
        size_bytes = max(*self._sizes(group), 1)
        batch_rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES * (end - begin) // size_bytes))
        error: WeirError | None = None
        while error is None:
            place = begin
            try:
                for batch in self._opened.iter_batches(batch_rows, [group], names, use_threads=False):
                    last = min(place + len(batch), end)
                    if last > row:
                        for event in self._of_batch(batch.slice(row - place, last - row), row):
                            row += 1
                            yield event
                            del event  # see `rows`
                    place += len(batch)
                error = invalid(
                    f"'{self._name}': row group {group} has {place - begin} rows, but {end - begin} by the footer"
                )
            except MemoryError:
                if batch_rows == 1:
                    error = invalid(
                        f"'{self._name}': row {row} and the rest of row group {group} take {self._too_much}: write smaller "
                        "values, dictionaries and pages, and smaller row groups"
                    )
                batch_rows = max(1, batch_rows // _SMALLER)
            except (OSError, arrow().ArrowException) as problem:
                error = self._unreadable(problem)
        if row < end:
            yield FailedRows(end, error)

    def _of_batch(self, batch: Any, row: int) -> Iterator[list[Tensor] | WeirError]:
        """The rows of `batch`, the first of which has the number `row`."""
        try:
            columns = [
                self._column(as_text(batch.column(declared.name)), declared.datatype) for declared in self._inputs
            ]
        except MemoryError:
            if len(batch) == 1:
                yield self._too_large(row)
                return
            half = len(batch) // 2
            yield from self._of_batch(batch.slice(0, half), row)
            yield from self._of_batch(batch.slice(half), row + half)
            return
        for place in range(len(batch)):
            try:
                yield self._row(columns, place)
            except MemoryError:
                yield self._too_large(row + place)

    def _unreadable(self, error: Exception) -> WeirError:
        return invalid(f"'{self._name}' can't be read: {_first_line(error)}")

    def _too_large(self, row: int) -> WeirError:
        return invalid(f"'{self._name}': row {row} takes {self._too_much}: write smaller values")

    def _row(self, columns: list[_Values], place: int) -> list[Tensor] | WeirError:
        tensors: list[Tensor] = []
        problem: WeirError | None = None
        room_bytes = MAX_ITEM_BYTES
        for declared, value_of in zip(self._inputs, columns, strict=True):
            try:
                value = value_of(place, room_bytes)
            except ItemTooLarge:
                what = "row" if tensors else f"column '{declared.name}'"
                return invalid(f"{what} is larger than {MAX_ITEM_BYTES} bytes")
            if isinstance(value, WeirError):
                problem = invalid(f"column '{declared.name}': {value.message}")
            elif value is None:
                if not declared.optional:
                    problem = invalid(f"column '{declared.name}' is null")
            else:
                try:
                    tensors.append(Tensor(declared.name, declared.datatype, declared.shape_of(value[0]), value[1]))
                    room_bytes -= len(value[1])
                except WeirError as error:
                    problem = error
        return problem or tensors

    def _column(self, column: Any, datatype: str) -> _Values:
        """The values of `column`, converted together; one by one if that fails, to find the invalid ones."""
        try:
            return ColumnValues(column, datatype).value
        except MemoryError:  # one of Arrow's is an ArrowException too
            raise
        except (arrow().ArrowException, WeirError) as error:
            problem = error if isinstance(error, WeirError) else invalid(_first_line(error))
            if len(column) == 1:
                return lambda _place, _most_bytes: problem

        def converted(place: int, most_bytes: int) -> Row | WeirError | None:
            return self._column(column.slice(place, 1), datatype)(0, most_bytes)

        return converted


_Values = Callable[[int, int], Row | WeirError | None]
"""The value of a row of a column, see `ColumnValues.value`."""


def _leaf_count(type: Any) -> int:
    """How many columns of a file make up one of this type."""
    types = arrow().types
    if types.is_dictionary(type):
        return 1
    if types.is_map(type):
        return _leaf_count(type.key_type) + _leaf_count(type.item_type)
    return sum(_leaf_count(type.field(place).type) for place in range(type.num_fields)) if type.num_fields else 1


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
