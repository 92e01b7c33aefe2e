"""What the reading of Parquet refuses: what can't fit by the footer, footers without bounds, and what expands too far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.gateway.job_models import InProcess, model
from weir.jobs.formats import parquet_rows
from weir.jobs.formats.files import open_input
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError

STRING = model(X=("BYTES", [1]))
LISTS = model(X=("FP32", [-1]))
MIB = 1 << 20


def items(file: Path, config: ModelConfig, memory_bytes: int = 64 * MIB) -> list[Any]:
    """The content of each row, or the text of its error."""
    given = open_input([file], None, config, InProcess(memory_bytes))
    return [
        item.inputs.message if isinstance(item.inputs, WeirError) else [bytes(tensor.data) for tensor in item.inputs]
        for item in given.items()
    ]


def write(path: Path, column: Any, **options: Any) -> Path:
    pq.write_table(pa.table({"X": column}), path / "a.parquet", **options)
    return path / "a.parquet"


def refusal(file: Path, config: ModelConfig = STRING) -> str:
    with pytest.raises(WeirError) as refused:
        open_input([file], None, config, InProcess())
    return refused.value.message


@pytest.mark.parametrize("compression", ["gzip", "zstd", "snappy"])
def test_a_group_of_too_large_values_is_refused_by_the_footer(tmp_path: Path, compression: str) -> None:
    column = pa.array([b"x" * (3 * MIB), b"y", b"z"], pa.binary())
    file = write(tmp_path, column, row_group_size=1, compression=compression)
    first, *others = items(file, STRING, MIB)
    assert first.startswith("'a.parquet': row group 0 has rows of 31")
    assert "more than the 1 MiB of memory for reading a Parquet file: write smaller values" in first
    assert others == [[b"\1\0\0\0y"], [b"\1\0\0\0z"]]


def test_a_row_of_more_elements_than_an_item_may_have_is_refused_by_the_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_ITEM_BYTES", 4000)
    column = pa.array([[0.0] * 1001, [0.0] * 1000], pa.list_(pa.float32()))
    assert items(write(tmp_path, column, row_group_size=1), LISTS) == [
        "'a.parquet': row group 0 has 4004 bytes of values in a row, and an item may have 4000",
        [bytes(4000)],
    ]


def test_a_row_that_is_too_large_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_ITEM_BYTES", 100)
    two = model(X=("BYTES", [-1]), Y=("BYTES", [1]))
    table = pa.table({"X": [["a" * 50], ["b" * 50, "c" * 50], ["d"]], "Y": ["e" * 50, "", "f"]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert items(tmp_path / "a.parquet", two) == [
        "row is larger than 100 bytes",
        "column 'X' is larger than 100 bytes",
        [b"\1\0\0\0d", b"\1\0\0\0f"],
    ]


@pytest.mark.parametrize("store_schema", [True, False])
def test_strings_of_a_dictionary(tmp_path: Path, store_schema: bool) -> None:
    # With its schema stored, the column is read as a dictionary.
    words = pa.array([None, "a", "", "a", "bc"]).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array([0, 0, 2, 2, 4, 5]), words.take(pa.array([1, 2, 3, 4, 1])))
    pq.write_table(pa.table({"X": words, "Y": lists}), tmp_path / "a.parquet", store_schema=store_schema)
    config = model(X=("BYTES", [1], True), Y=("BYTES", [-1]))
    a, empty, bc = b"\1\0\0\0a", b"\0\0\0\0", b"\2\0\0\0bc"
    assert items(tmp_path / "a.parquet", config) == [[b""], [a, a + empty], [empty, b""], [a, a + bc], [bc, a]]


def test_rows_that_expand_to_more_than_a_file_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_DECODED_BYTES", 5000)
    monkeypatch.setattr(parquet_rows, "MAX_EXPANSION", 0)
    file = write(tmp_path, pa.array(["x" * 996] * 100), row_group_size=10)
    found = items(file, STRING)
    assert [type(item) for item in found] == [list] * 6 + [str] * 94
    assert found[6] == found[99]
    assert found[6] == (
        "'a.parquet': the rows up to 5 have 6000 bytes, and a file of this size may have 5000: "
        "distribute them over several files"
    )


def test_footers_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, pa.array(["a"] * 20), row_group_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(parquet_rows, "MAX_ROW_GROUPS", 9)
        assert refusal(file) == "'a.parquet' has 10 row groups, and 9 are allowed: write larger ones"
    with monkeypatch.context() as patched:
        patched.setattr(parquet_rows, "MAX_ROWS", 19)
        assert refusal(file) == "'a.parquet' has 20 rows, and 19 are allowed: write several files"
    with monkeypatch.context() as patched:
        patched.setattr(parquet_rows, "MAX_FOOTER_BYTES", 100)
        assert "'a.parquet' has a footer of " in refusal(file)
    assert len(items(file, STRING)) == 20


def test_columns_of_the_same_name(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["X", "X"]), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == "'a.parquet': columns have the same name"


def varint(value: int) -> bytes:
    """A positive number as the footer has it: zigzag, seven bits in a byte (Thrift's compact protocol)."""
    value *= 2
    written = bytearray()
    while value >= 128:
        written.append(value % 128 | 128)
        value //= 128
    return bytes([*written, value])


def lie(file: Path, told: int, wanted: int) -> None:
    """Replaces a number in the footer by another of as many bytes."""
    content = file.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    old, new = varint(told), varint(wanted)
    assert len(old) == len(new)
    assert old in content[start:]
    file.write_bytes(content[:start] + content[start:].replace(old, new))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_footer_that_claims_more_rows(tmp_path: Path, compression: str) -> None:
    file = write(tmp_path, pa.array(["a"] * 300), compression=compression)
    lie(file, 300, 8000)
    found = items(file, STRING)
    assert len(found) == 8000
    assert found[:300] == [[b"\1\0\0\0a"]] * 300
    assert set(map(str, found[300:])) == {"'a.parquet': row group 0 has 300 rows, but 8000 by the footer"}


def test_a_footer_that_claims_fewer_rows(tmp_path: Path) -> None:
    file = write(tmp_path, pa.array(["a"] * 8000))
    lie(file, 8000, 300)
    assert items(file, STRING) == [[b"\1\0\0\0a"]] * 300
