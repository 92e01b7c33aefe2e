"""Parquet: each row an item, each column an input; scalars, lists and lists of lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from gateway.jobs.files.arrow_columns import Row, arrow, check_column, rows_of
from gateway.jobs.files.declared_inputs import DeclaredInput, check_names
from gateway.jobs.files.found_files import FoundFile, open_regular, readable, unreadable
from gateway.jobs.files.items import MAX_ITEM_BYTES, JobItem
from schemas.errors import WeirError, invalid
from schemas.tensors import Tensor

BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 4096


class ParquetFile:
    """One Parquet file. Its schema is read at once: raises WeirError where it is not as the model wants."""

    def __init__(self, file: FoundFile, inputs: dict[str, DeclaredInput]) -> None:
        self._file = file
        self._name = readable(file.name)
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
        """See `ItemFile`."""
        return self._ends[-1] if self._ends else 0

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """See `ItemFile`. What can't be read of a group of rows are items in error; the next group is read again."""
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
                error = invalid(f"'{self._name}' has changed since its items were counted")
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
        """The values of `column`. Where they can't be converted together they are one by one, to find those."""
        try:
            # Nothing is handed on before all of it is converted.
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

    def __init__(self, file: FoundFile) -> None:
        self._file = file
        self._close: Callable[[], None] = lambda: None

    def __enter__(self) -> Any:
        pyarrow = arrow()
        name = readable(self._file.name)
        source = open(open_regular(self._file), "rb")
        self._close = source.close
        try:
            return pyarrow.parquet.ParquetFile(source, pre_buffer=False)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            source.close()
            raise invalid(f"'{name}' is no Parquet file: {_first_line(error)}") from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._close()
        if isinstance(error, OSError):
            raise unreadable(self._file.name, error) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
