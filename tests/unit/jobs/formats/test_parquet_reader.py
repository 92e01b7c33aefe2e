"""The process that reads Parquet files: what it returns is what decoding returns, within a limit of memory, and it fails
alone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.gateway.job_models import InProcess, model
from tests.unit.jobs.formats.test_parquet_rows import lie, varint
from weir.jobs.formats.files import open_input
from weir.jobs.formats.items import JobInput, JobItem
from weir.jobs.formats.parquet_reader import ParquetReader
from weir.schemas.core.errors import ErrorCode, WeirError

STRING = model(X=("BYTES", [1]))
MIB = 1 << 20
MEMORY_BYTES = 16 * MIB
TOO_MUCH = "more than the 16 MiB of memory for reading a Parquet file"


@pytest.fixture(scope="module")
def reader() -> Iterator[ParquetReader]:
    reader = ParquetReader(MEMORY_BYTES)
    yield reader
    reader.close()


def content(item: JobItem) -> Any:
    if isinstance(item.inputs, WeirError):
        return item.inputs.code, item.inputs.message
    return [(tensor.name, tensor.datatype, tuple(tensor.shape), bytes(tensor.data)) for tensor in item.inputs]


def contents(given: JobInput, start: int = 0) -> list[Any]:
    return [(item.number, item.source, content(item)) for item in given.items(start)]


def errors(given: JobInput) -> list[str | None]:
    return [item.inputs.message if isinstance(item.inputs, WeirError) else None for item in given.items()]


def write(path: Path, *columns: Any, **options: Any) -> Path:
    """A file in the folder `path`, with a row group for each of these columns."""
    options = {"write_statistics": False, **options}  # which are copies of large values
    with pq.ParquetWriter(path / "a.parquet", pa.table({"X": columns[0]}).schema, **options) as writer:
        for column in columns:
            writer.write_table(pa.table({"X": column}))
    return path / "a.parquet"


def noise(rows: int, size: int) -> pa.Array:
    random = np.random.default_rng(1)
    return pa.array([random.bytes(size) for _ in range(rows)], pa.binary())


def test_items_and_errors_are_those_of_decoding_from_any_row_on(tmp_path: Path, reader: ParquetReader) -> None:
    config = model(N=("INT8", [1]), L=("FP32", [2, -1]), S=("BYTES", [1], True), D=("BYTES", [-1]))
    count = 1500
    words = pa.array([f"word {number % 7}" for number in range(2 * count)]).dictionary_encode()
    columns = {
        "N": [300 if number % 11 == 3 else number % 100 for number in range(count)],
        "L": [[[number, 1], [2, 3]] if number % 5 else [[1], []] for number in range(count)],
        "S": [None if number % 3 else f"é {number}" for number in range(count)],
        "D": pa.ListArray.from_arrays(pa.array(range(0, 2 * count + 1, 2), pa.int32()), words),
    }
    for name, group_rows in (("a", 1500), ("b", 400)):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet", row_group_size=group_rows)
    decoded, read = (open_input([tmp_path], None, config, source) for source in (InProcess(), reader))
    assert read.count() == decoded.count() == 2 * count
    expected = contents(decoded)
    for start in (0, 1, 399, 1500, 1899, 1900, 2345, 2999, 3000):
        assert contents(read, start) == expected[start:]


def test_reading_may_end_anywhere_and_begin_again(tmp_path: Path, reader: ParquetReader) -> None:
    given = open_input([write(tmp_path, noise(3000, 1000))], None, STRING, reader)
    expected = contents(given)
    pid = reader.pid
    for start in (0, 2999, 5):
        assert content(next(iter(given.items(start)))) == expected[start][2]
    assert reader.pid == pid


def test_files_that_are_refused(tmp_path: Path, reader: ParquetReader) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 it is not PAR1")
    with pytest.raises(WeirError, match=r"'a\.parquet' is not a Parquet file") as refused:
        open_input([tmp_path / "a.parquet"], None, STRING, reader)
    assert refused.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(WeirError, match="column 'Y' is missing"):
        open_input([write(tmp_path, ["a"])], None, model(X=("BYTES", [1]), Y=("BYTES", [1])), reader)


def test_a_footer_that_expands(tmp_path: Path, reader: ParquetReader) -> None:
    # Thrift's compact protocol: schema "r" of one string "X", and one row group whose columns have nothing but a place.
    schema = b"\x19\x2c" + b"\x48\x01r\x15\x02\x00" + b"\x15\x0c\x25\x02\x18\x01X\x00"
    columns = b"\x19\xfc\xa0\x8d\x06" + b"\x26\x00\x00" * 100_000
    row_groups = b"\x19\x1c" + columns + b"\x16\x00\x16\x02\x00"
    footer = b"\x15\x02" + schema + b"\x16\x02" + row_groups + b"\x00"
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(WeirError) as refused:
        open_input([tmp_path], None, STRING, reader)
    assert refused.value.message.startswith(f"'a.parquet': its footer takes {TOO_MUCH}: write fewer columns")


@pytest.mark.parametrize("compression", ["gzip", "zstd", "snappy"])
def test_a_page_that_expands(tmp_path: Path, reader: ParquetReader, compression: str) -> None:
    # The mean row would fit. The page can't be read in parts.
    large = pa.array([b"a", b"b" * (24 * MIB), b"c", b"d"], pa.binary())
    file = write(tmp_path, large, pa.array([b"e"], pa.binary()), use_dictionary=False, compression=compression)
    given = open_input([file], None, STRING, reader)
    found = errors(given)
    assert f"'a.parquet': row 0 and the rest of row group 0 take {TOO_MUCH}: write smaller values" in str(found[3])
    assert [error is None for error in found] == [False, False, False, False, True]


def test_a_page_that_a_lying_footer_hides(tmp_path: Path, reader: ParquetReader) -> None:
    file = write(tmp_path, pa.array([b"b" * (24 * MIB)], pa.binary()), pa.array([b"e"]), use_dictionary=False)
    size_bytes = pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size
    assert len(varint(size_bytes)) == len(varint(10 * MIB))
    given = open_input([file], None, STRING, reader)
    assert "row group 0 has rows of 25165" in str(errors(given)[0])
    lie(file, size_bytes, 10 * MIB)
    assert pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size == 10 * MIB
    found = errors(given)
    assert f"'a.parquet': row 0 and the rest of row group 0 take {TOO_MUCH}" in str(found[0])
    assert found[1:] == [None]


@pytest.mark.parametrize("store_schema", [True, False])
def test_a_dictionary_that_expands(tmp_path: Path, reader: ParquetReader, store_schema: bool) -> None:
    # Each row fits, and four of them do not. Without its schema, the column is not read as a dictionary.
    value = b"d" * MIB
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 50 + [1]), pa.array([value, b"e"]))
    given = open_input([write(tmp_path, column, store_schema=store_schema)], None, STRING, reader)
    found = [content(item) for item in given.items()]
    packed = MIB.to_bytes(4, "little") + value
    assert found == [[("X", "BYTES", (1, 1), packed)]] * 50 + [[("X", "BYTES", (1, 1), b"\1\0\0\0e")]]


def test_a_dictionary_that_is_too_large(tmp_path: Path, reader: ParquetReader) -> None:
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 5000), pa.array([b"d" * (24 * MIB)]))
    small = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([b"d"]))
    found = errors(open_input([write(tmp_path, large, large, small)], None, STRING, reader))
    assert len(found) == 10_001
    assert f"row 0 and the rest of row group 0 take {TOO_MUCH}" in str(found[4999])
    assert f"row 5000 and the rest of row group 1 take {TOO_MUCH}" in str(found[5000])
    assert found[10_000] is None


@pytest.mark.parametrize("datatype", ["BYTES", "FP32"])
def test_all_values_in_one_row(tmp_path: Path, reader: ParquetReader, datatype: str) -> None:
    if datatype == "BYTES":
        config = model(X=("BYTES", [-1]))
        column = pa.array([[b"x" * 100] * 300_000, [b"y"], [b"z"]], pa.list_(pa.binary()))
    else:
        config = model(X=("FP32", [-1, 1]))
        column = pa.array([[[0.0]] * 3_000_000, [[1.0]]], pa.list_(pa.list_(pa.float32())))
    found = errors(open_input([write(tmp_path, column)], None, config, reader))
    assert TOO_MUCH in str(found[0])
    assert reader.pid is not None


def test_many_columns(tmp_path: Path, reader: ParquetReader) -> None:
    names = [f"X{number}" for number in range(8)]
    pq.write_table(pa.table({name: [b"x" * (4 * MIB), b"y"] for name in names}), tmp_path / "a.parquet")
    config = model(**{name: ("BYTES", [1]) for name in names})
    assert TOO_MUCH in str(errors(open_input([tmp_path], None, config, reader))[0])


def test_a_process_that_is_killed_fails_the_rest_of_its_row_group(tmp_path: Path, reader: ParquetReader) -> None:
    # More than the pipe holds, so that it still sends.
    given = open_input([write(tmp_path, noise(600, 5000), noise(600, 5000))], None, STRING, reader)
    expected = contents(given)
    items = given.items()
    found = [next(items)]
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    found += items
    assert [item.number for item in found] == list(range(1200))
    good = [isinstance(item.inputs, list) for item in found]
    read = good.index(False)
    assert good == [True] * read + [False] * (600 - read) + [True] * 600
    assert [content(item) for item in found[:read] + found[600:]] == [
        row for _, _, row in expected[:read] + expected[600:]
    ]
    assert "'a.parquet' can't be read: the process that reads it was ended by SIGKILL" in content(found[read])[1]


def test_a_process_that_dies_again_and_again_fails_the_rest_of_the_file(tmp_path: Path, reader: ParquetReader) -> None:
    given = open_input([write(tmp_path, *[noise(3000, 1000)] * 5)], None, STRING, reader)
    found = []
    for item in given.items():
        if item.number % 3000 == 0 and isinstance(item.inputs, list):
            assert reader.pid is not None
            os.kill(reader.pid, signal.SIGKILL)
        found.append(content(item)[0] is ErrorCode.INVALID_ARG)
    assert [group for group in range(5) if not found[3000 * group]] == [0, 1, 2]
    assert found[9000:] == [True] * 6000


def test_a_process_that_was_killed_while_it_had_nothing_to_do(tmp_path: Path, reader: ParquetReader) -> None:
    given = open_input([write(tmp_path, ["a"])], None, STRING, reader)
    assert reader.pid is not None
    process = os.pidfd_open(reader.pid)
    os.kill(reader.pid, signal.SIGKILL)
    assert select.select([process], [], [], 10)[0]
    os.close(process)
    assert errors(given) == [None]


def test_a_process_that_hangs_is_killed(tmp_path: Path) -> None:
    file = write(tmp_path, ["a"])
    reader = ParquetReader(read_limit_s=0.001)  # its start takes longer
    with pytest.raises(WeirError, match=r"the process that reads it had no next rows within 0\.001 s, and was ended"):
        open_input([file], None, STRING, reader)
    assert reader.pid is None


def readers() -> list[psutil.Process]:
    """The processes that this one has started to read Parquet."""
    return [child for child in psutil.Process().children() if is_reader(child)]


def is_reader(process: psutil.Process) -> bool:
    try:
        return any("parquet_process" in text for text in process.cmdline())
    except psutil.Error:  # one of another test that ends just now
        return False


def test_an_input_has_a_process_of_its_own_which_ends_with_it(tmp_path: Path) -> None:
    before = readers()
    given = open_input([write(tmp_path, ["a"])], None, STRING)
    (process,) = [process for process in readers() if process not in before]
    assert errors(given) == [None]
    given.close()
    given.close()
    assert not process.is_running()
    with pytest.raises(WeirError, match="column 'Y' is missing"):
        open_input([tmp_path], None, model(X=("BYTES", [1]), Y=("BYTES", [1])))
    assert readers() == before


PARENT = """
import os, signal, sys
from tests.support.gateway.job_models import model
from weir.jobs.formats.files import open_input
from weir.jobs.formats.parquet_reader import ParquetReader
reader = ParquetReader()
items = open_input([sys.argv[1]], None, model(X=("BYTES", [1])), reader).items()
next(items)
print(reader.pid, flush=True)
os.read(0, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(write(tmp_path, noise(6000, 1000)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        process = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.stdin.write("x")
            parent.stdin.flush()
            assert select.select([process], [], [], 10)[0], "the process still runs"
        finally:
            os.close(process)
            parent.kill()
            parent.wait()
