"""Shards of JSON Lines: `{"item": n, "source": …, "outputs": {name: value …}}`, or `"error": text` for the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import orjson
import rapidjson

from gateway.jobs.files.items import ItemResult
from gateway.jobs.files.json_values import from_bf16, json_rows
from gateway.jobs.files.output_columns import OutputColumn, columns_of
from gateway.jobs.files.shard_format import ShardFormat, text_of
from schemas.errors import WeirError

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class JsonShards(ShardFormat):
    """See the module. Values are nested as their shape is, without the batch dimension where it is 1."""

    suffix = ".jsonl"

    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """See `ShardFormat`."""
        lines, failures = self._lines(results)
        file.write(b"".join(lines))
        return failures

    def failed(self, file: BinaryIO) -> list[int]:
        """See `ShardFormat`."""
        # An output may be called so too: where the text is there, the line is read.
        return [row["item"] for line in file if b'"error":' in line and "error" in (row := _read(line))]

    def replace(self, old: BinaryIO, new: BinaryIO, results: Sequence[ItemResult]) -> int:
        """See `ShardFormat`."""
        lines, failures = self._lines(results)
        by_number = {result.number: line for result, line in zip(results, lines, strict=True)}
        for line in old:
            row = _read(line)
            replaced = by_number.get(row["item"])
            failures += replaced is None and "error" in row
            new.write(line if replaced is None else replaced)
        return failures

    def _lines(self, results: Sequence[ItemResult]) -> tuple[list[bytes], int]:
        errors: list[WeirError | None] = [None] * len(results)
        columns = columns_of(results, self.outputs, errors)
        outputs: list[dict[str, Any]] = [{} for _ in results]
        for column in columns:
            name = column.name
            for place, value in _json_column(column):
                outputs[place][name] = value
        dumps = orjson.dumps
        lines = [
            dumps({"item": result.number, "source": result.source, "outputs": values}, None, _OPTIONS)
            if error is None
            else dumps({"item": result.number, "source": result.source, "error": text_of(error)}, None, _OPTIONS)
            for result, values, error in zip(results, outputs, errors, strict=True)
        ]
        return lines, len(errors) - errors.count(None)


def _json_column(column: OutputColumn) -> Iterator[tuple[int, Any]]:
    """(place, what orjson writes) of each value that is there."""
    shape = column.shape
    places = [place for place, known in enumerate(column.shapes) if known is not None]
    if shape is not None:
        array = column.stacked(shape)
        yield from zip(places, json_rows(from_bf16(array) if column.datatype == "BF16" else array), strict=True)
        return
    for place in places:
        value = column.value(place)
        if value is not None:
            yield place, json_rows((from_bf16(value) if column.datatype == "BF16" else value)[None])[0]


def _read(line: bytes) -> dict[str, Any]:
    """A line of a shard. Raises ValueError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = rapidjson.loads(line, number_mode=rapidjson.NM_NAN)
    if type(row) is not dict or type(row.get("item")) is not int:
        raise ValueError("not a line of a shard")
    return row
