"""Shards of Parquet: a row for each item, with columns `item`, `source`, `error`, and one for each output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

from gateway.jobs.files.arrow_columns import arrow, arrow_column, column_type, rows_of
from gateway.jobs.files.items import ItemResult
from gateway.jobs.files.output_columns import columns_of
from gateway.jobs.files.shard_format import WholeShards, text_of
from schemas.datatypes import BY_CONFIG_NAME
from schemas.errors import ErrorCode, WeirError
from schemas.model_config import ModelOutput
from schemas.tensors import Tensor


class ParquetShards(WholeShards):
    """See the module. Outputs of an item that failed are null, `error` is null where it did not."""

    suffix = ".parquet"
    own_names = ("item", "source", "error")

    def __init__(self, outputs: Sequence[ModelOutput]) -> None:
        super().__init__(outputs)
        pyarrow = arrow()
        fields = [("item", pyarrow.int64()), ("source", pyarrow.string()), ("error", pyarrow.string())]
        fields += [(output.name, _type_of(output)) for output in outputs]
        self._schema = pyarrow.schema(fields)

    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """See `ShardFormat`."""
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
        """See `ShardFormat`."""
        table = self._table(file, ["item", "error"])
        numbers: list[int] = table.filter(table.column("error").is_valid()).column("item").to_pylist()
        return numbers

    def read(self, file: BinaryIO) -> list[ItemResult]:
        """See `WholeShards`."""
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
            raise ValueError("its columns are others")
        return table


def _datatype(output: ModelOutput) -> str:
    return BY_CONFIG_NAME[output.data_type].name


def _type_of(output: ModelOutput) -> Any:
    return column_type(_datatype(output), output.dims)
