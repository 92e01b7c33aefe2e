"""Columns of Parquet files that are no inputs: results repeat those that a job chooses."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.gateway.job_models import InProcess, model
from weir.jobs.formats.files import JobOutput, open_input
from weir.jobs.formats.items import ItemResult, JobItem, KeptColumn
from weir.jobs.formats.parquet_reader import ParquetReader, RowSource
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.tensors import Tensor

CONFIG = model(outputs={"OUT": ("FP32", [1])}, IN=("FP32", [1]))
WHEN = datetime.datetime(2026, 11, 28, 5, 30, 1)
ROWS = {
    "meta": pa.array([{"a": 1, "b": [1.5]}, None, {"a": 3, "b": []}]),
    "id": pa.array([7, None, 9], pa.int64()),
    "IN": pa.array([1.0, 2.0, 3.0], pa.float32()),
    "label": pa.array(["cat", "dög", None]).dictionary_encode(),
    "when": pa.array([WHEN, None, WHEN], pa.timestamp("ms")),
    "good": pa.array([True, False, None]),
    "weight": pa.array([0.5, None, 2.5], pa.float64()),
    "raw": pa.array([b"a", b"b", b"c"], pa.binary()),
}
CHOSEN = ["weight", "IN", "id", "label", "when", "good"]
KEPT = [
    {"weight": 0.5, "id": 7, "label": "cat", "when": "2026-11-28 05:30:01.000", "good": True},
    {"label": "dög", "good": False},
    {"weight": 2.5, "id": 9, "when": "2026-11-28 05:30:01.000"},
]


def write(file: Path, **changed: Any) -> Path:
    pq.write_table(pa.table({**ROWS, **changed}), file, row_group_size=2)
    return file


def answered(items: Sequence[JobItem]) -> list[ItemResult]:
    """The second item fails; the others have one more than their input."""
    results: list[ItemResult] = []
    for item in items:
        assert isinstance(item.inputs, list)
        (given,) = item.inputs
        assert given.name == "IN"
        outputs = None if item.number == 1 else [Tensor("OUT", "FP32", (1,), given.data)]
        results.append(ItemResult(item.number, item.source, outputs, None if outputs else invalid("no"), item.kept))
    return results


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_results_repeat_the_columns_that_are_no_input(tmp_path: Path, format: str, in_process: bool) -> None:
    source: RowSource = InProcess() if in_process else ParquetReader()
    given = open_input([write(tmp_path / "a.parquet")], None, CONFIG, source, CHOSEN)
    items = list(given.items())
    assert [item.number for item in given.items(2)] == [2]
    output = JobOutput(tmp_path / "out", format, CONFIG.output, given.kept)
    assert output.write(0, answered(items)) == 1
    output.rewrite(0, [ItemResult(1, "a.parquet[1]", None, invalid("again"), items[1].kept)])
    (shard,) = (tmp_path / "out").glob("part-*")
    if format == "jsonl":
        lines = [json.loads(line) for line in shard.read_bytes().splitlines()]
        assert [line["columns"] for line in lines] == KEPT
        assert [line.get("error") for line in lines] == [None, "again", None]
    else:
        table = pq.read_table(shard)
        assert [table.schema.field(name).type for name in CHOSEN if name != "IN"] == [
            pa.float64(),
            pa.int64(),
            pa.string(),
            pa.string(),
            pa.bool_(),
        ]
        columns = table.select([name for name in CHOSEN if name != "IN"]).to_pylist()
        assert [{name: found for name, found in row.items() if found is not None} for row in columns] == KEPT
        assert table.column("OUT").to_pylist() == [1.0, None, 3.0]
        assert table.column("error").to_pylist() == [None, "again", None]
    if isinstance(source, ParquetReader):
        source.close()


def test_a_choice_of_inputs_leaves_the_other_columns_out(tmp_path: Path) -> None:
    given = open_input([write(tmp_path / "a.parquet")], None, CONFIG, InProcess(), ["IN"])
    assert not given.kept
    assert [item.kept for item in given.items()] == [()] * 3
    assert all(isinstance(item.inputs, list) for item in given.items())


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ([], r"column 'meta' is not an input of the model; its inputs are \['IN'\]\. Choose the columns to read"),
        ([], r"\(--columns=IN,meta,id,label,when,good,weight,raw\): results repeat those that are no input"),
        (["id"], "column 'IN' is missing"),
        (["IN", "nothing"], r"'a.parquet' has no column 'nothing'; its columns are \['IN', 'good', 'id'"),
        (["IN", "raw"], "column 'raw' holds binary, and results repeat numbers, booleans, text and times only"),
        (["IN", "meta"], "column 'meta' holds struct<.*>, and results repeat"),
    ],
)
def test_choices_that_are_refused(tmp_path: Path, columns: list[str], why: str) -> None:
    file = write(tmp_path / "a.parquet")
    with pytest.raises(WeirError, match=why):
        open_input([file], None, CONFIG, InProcess(), columns)


def test_the_files_of_a_job_have_one_type_for_a_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", id=pa.array(["7", "8", "9"]))
    with pytest.raises(WeirError, match=r"'b\.parquet': column 'id' holds BYTES, but INT64 in 'a\.parquet'"):
        open_input([tmp_path], None, CONFIG, InProcess(), ["IN", "id"])


def test_other_inputs_have_no_columns_to_choose(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"IN": 1}\n')
    with pytest.raises(WeirError, match="columns are chosen in Parquet files, and the job's input has format 'jsonl'"):
        open_input([tmp_path / "a.jsonl"], None, CONFIG, columns=["IN"])


@pytest.mark.parametrize(("name", "format"), [("item", "parquet"), ("OUT", "parquet"), ("id", "npz")])
def test_columns_that_an_output_can_not_have(tmp_path: Path, name: str, format: str) -> None:
    with pytest.raises(WeirError, match=f"column '{name}' can't be"):
        JobOutput(tmp_path, format, CONFIG.output, [KeptColumn(name, "INT64")])
