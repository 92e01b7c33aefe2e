"""The shards of a job's output: what is written, over any number of restarts, is each item once, in order."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.gateway.job_models import ALL, InProcess, model, value
from weir.jobs.formats import files, parquet
from weir.jobs.formats.files import ItemResult, JobOutput, OutputFormat, open_input
from weir.jobs.formats.items import DeclaredInput, declared_inputs
from weir.jobs.formats.jsonl import tensor_of
from weir.jobs.formats.npy import NumpyShards
from weir.jobs.formats.parquet import ColumnValues
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.core.tensors import Tensor

EVERY_TYPE = model(
    outputs={f"{name}{'x'.join(map(str, dims))}": (name, list(dims)) for name in ALL for dims in [(1,), (2, 3), (-1,)]}
)
FORMATS = list(OutputFormat)


def results_from(random: np.random.Generator, config: ModelConfig, first: int, count: int) -> list[ItemResult]:
    results = []
    for number in range(first, first + count):
        if random.random() < 0.2:
            results.append(ItemResult(number, f"s{number}", None, invalid(f"no {number} ✗")))
            continue
        outputs = []
        for output in config.output:
            dims = tuple(int(random.integers(0, 4)) if dim < 0 else dim for dim in output.dims)
            datatype = next(name for name in ALL if f"TYPE_{name}" == output.data_type.replace("STRING", "BYTES"))
            outputs.append(value(random, output.name, datatype, (1, *dims)))
        results.append(ItemResult(number, f"s{number}", outputs, None))
    return results


Content = tuple[int, str, dict[str, tuple[tuple[int, ...], bytes]] | str]


def content_of(result: ItemResult) -> Content:
    if result.error is not None:
        return result.number, result.source, result.error.message
    assert result.outputs is not None
    return (
        result.number,
        result.source,
        {
            tensor.name: (tuple(tensor.shape)[-2 if "2x3" in tensor.name else -1 :], bytes(tensor.data))
            for tensor in result.outputs
        },
    )


def as_inputs(config: ModelConfig) -> dict[str, DeclaredInput]:
    """What was written as outputs is read as inputs of the same types."""
    inputs = [output.model_dump(include={"name", "data_type", "dims"}) | {"optional": True} for output in config.output]
    return declared_inputs(ModelConfig.model_validate({"name": "m", "max_batch_size": 8, "input": inputs}))


def read_jsonl(path: Path, config: ModelConfig) -> list[Content]:
    declared = as_inputs(config)
    found: list[Content] = []
    for line in path.read_bytes().splitlines():
        row = json.loads(line)  # of the parsers, the one that takes infinities and loses no bit
        if "error" in row:
            found.append((row["item"], row["source"], row["error"]))
            continue
        tensors = [tensor_of(declared[name], given) for name, given in row["outputs"].items()]
        found.append(content_of(ItemResult(row["item"], row["source"], tensors, None)))
    return found


def read_parquet(path: Path, config: ModelConfig) -> list[Content]:
    table = pyarrow.parquet.read_table(path)
    own = [table.column(name).to_pylist() for name in ("item", "source", "error")]
    declared = as_inputs(config)
    columns = [ColumnValues(table.column(name).combine_chunks(), declared[name].datatype) for name in declared]
    found: list[Content] = []
    for place, (number, source, error) in enumerate(zip(*own, strict=True)):
        values = [column.value(place) for column in columns]
        if error is not None:
            assert set(values) == {None}
            found.append((number, source, error))
            continue
        tensors = [
            Tensor(given.name, given.datatype, given.shape_of(row[0]), row[1])  # type: ignore[index]
            for given, row in zip(declared.values(), values, strict=True)
        ]
        found.append(content_of(ItemResult(number, source, tensors, None)))
    return found


def read_npz(path: Path, config: ModelConfig) -> list[Content]:
    with path.open("rb") as file:
        return [content_of(result) for result in NumpyShards(config.output).read(file)]


READERS = {OutputFormat.JSONL: read_jsonl, OutputFormat.NPZ: read_npz, OutputFormat.PARQUET: read_parquet}


def read_back(folder: Path, format: OutputFormat, config: ModelConfig) -> list[Content]:
    return [row for path in sorted(folder.glob("part-*")) for row in READERS[format](path, config)]


def expected(results: list[ItemResult]) -> list[Content]:
    return [content_of(result) for result in results]


@pytest.fixture(scope="module")
def unsynced() -> Iterator[None]:
    """Many shards in little time: what a disk would keep is no matter of these tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 12), min_size=1, max_size=5), data=st.data())
def test_each_item_is_there_once_and_in_order_after_any_restarts(
    tmp_path_factory: pytest.TempPathFactory, format: OutputFormat, seed: int, cuts: list[int], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("out")
    random = np.random.default_rng(seed)
    results = results_from(random, EVERY_TYPE, 0, sum(cuts))
    output = JobOutput(folder, format, EVERY_TYPE.output)
    for cut in cuts:
        first = output.covered()
        match data.draw(st.sampled_from(["live", "die before", "die while", "die after"])):
            case "die before":
                output = JobOutput(folder, format, EVERY_TYPE.output)
            case "die while":
                half = folder / f".part-{first:010}-{first + cut - 1:010}.{format}.{os.getpid()}.tmp"
                half.write_bytes(b"half of it")
                output = JobOutput(folder, format, EVERY_TYPE.output)
                assert not half.exists()
            case "die after" if first < len(results):
                output.write(first, results[first : first + cut])
                output = JobOutput(folder, format, EVERY_TYPE.output)
                first = min(first + cut, len(results))
        assert output.covered() == first
        if part := results[first : first + cut]:
            failed = output.write(first, part)
            assert failed == sum(result.error is not None for result in part)
    while (first := output.covered()) < len(results):
        output.write(first, results[first : first + 7])
    assert read_back(folder, format, EVERY_TYPE) == expected(results)

    # Failures are tried again: some succeed.
    for first, numbers in output.failures():
        again = [results_from(random, EVERY_TYPE, number, 1)[0] for number in numbers]
        for result in again:
            results[result.number] = result
        assert output.rewrite(first, again) == sum(result.error is not None for result in again)
    assert read_back(folder, format, EVERY_TYPE) == expected(results)
    failed = [number for _, numbers in output.failures() for number in numbers]
    assert failed == [result.number for result in results if result.error is not None]


def one(number: int, *values: float) -> ItemResult:
    return ItemResult(
        number, "s", [Tensor("Y", "FP32", [1, len(values)], np.array(values, np.float32).tobytes())], None
    )


NUMBERS = model(outputs={"Y": ("FP32", [2])}).output


def test_the_lines_of_a_shard(tmp_path: Path) -> None:
    output = JobOutput(
        tmp_path / "new" / "folder", "jsonl", model(outputs={"Y": ("FP32", [-1]), "S": ("BYTES", [1])}).output
    )
    text = Tensor("S", "BYTES", [1, 1], b"\3\0\0\0a\xffb")
    results = [
        ItemResult(
            0, "a.txt", [Tensor("Y", "FP32", [1, 2], np.array([0.1, np.nan], np.float32).tobytes()), text], None
        ),
        ItemResult(1, "b", None, invalid("broken \ud800")),
        ItemResult(2, "c", [Tensor("Y", "FP32", [2, 1], bytes(8))], None),
    ]
    assert output.write(0, results) == 1
    output.finish({"items": 3})
    assert sorted(os.listdir(tmp_path / "new/folder")) == ["part-0000000000-0000000002.jsonl", "summary.json"]
    lines = (tmp_path / "new/folder/part-0000000000-0000000002.jsonl").read_text().splitlines()
    assert lines == [
        '{"item":0,"source":"a.txt","outputs":{"Y":[0.10000000149011612,NaN],"S":[{"base64":"Yf9i"}]}}',
        '{"item":1,"source":"b","error":"broken ?"}',
        '{"item":2,"source":"c","outputs":{"Y":[[0.0],[0.0]]}}',
    ]
    assert orjson.loads((tmp_path / "new/folder/summary.json").read_bytes()) == {"items": 3}


def test_the_columns_of_parquet(tmp_path: Path) -> None:
    declared = model(outputs={"A": ("INT64", [1]), "B": ("FP32", [2]), "C": ("BYTES", [-1])}).output
    outputs = [
        Tensor("A", "INT64", [1, 1], (7).to_bytes(8, "little")),
        Tensor("B", "FP32", [1, 2], bytes(8)),
        Tensor("C", "BYTES", [1, 1], b"\1\0\0\0x"),
    ]
    JobOutput(tmp_path, "parquet", declared).write(
        0, [ItemResult(0, "s", outputs, None), ItemResult(1, "t", None, invalid("no"))]
    )
    assert pyarrow.parquet.read_table(next(tmp_path.glob("part*"))).to_pylist() == [
        {"item": 0, "source": "s", "error": None, "A": 7, "B": [0.0, 0.0], "C": [b"x"]},
        {"item": 1, "source": "t", "error": "no", "A": None, "B": None, "C": None},
    ]


LARGE_BYTES = 1 << 20


def test_a_shard_of_large_items_is_written_without_copies_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[int] = []
    monkeypatch.setattr(files, "return_free_memory", lambda: returned.append(1))
    monkeypatch.setattr(files, "LARGE_SHARD_BYTES", LARGE_BYTES)
    monkeypatch.setattr(parquet, "LARGE_SHARD_BYTES", LARGE_BYTES)
    outputs = model(outputs={"C": ("BYTES", [1])}).output
    output = JobOutput(tmp_path, "parquet", outputs)
    sizes = (LARGE_BYTES // 2, LARGE_BYTES)
    for number, size in enumerate(sizes):
        tensor = Tensor("C", "BYTES", [1, 1], size.to_bytes(4, "little") + b"x" * size)
        output.write(number, [ItemResult(number, "s", [tensor], None)])
    small, large = sorted(tmp_path.glob("part*"))
    columns = [pyarrow.parquet.read_metadata(file).row_group(0).column(3) for file in (small, large)]
    assert [column.has_dictionary_page for column in columns] == [True, False]
    assert [pyarrow.parquet.read_metadata(file).row_group(0).column(0).is_stats_set for file in (small, large)] == [
        True,
        False,
    ]
    assert [pyarrow.parquet.read_table(file)["C"].to_pylist() for file in (small, large)] == [
        [b"x" * size] for size in sizes
    ]
    assert returned == [1]


def test_the_arrays_of_npz(tmp_path: Path) -> None:
    declared = model(outputs={"B": ("FP32", [2]), "V": ("INT32", [-1]), "C": ("BYTES", [1])}).output
    outputs = [
        Tensor("B", "FP32", [1, 2], np.array([1, 2], np.float32).tobytes()),
        Tensor("V", "INT32", [1, 3], np.array([1, 2, 3], np.int32).tobytes()),
        Tensor("C", "BYTES", [1, 1], b"\2\0\0\0x\0"),
    ]
    JobOutput(tmp_path, "npz", declared).write(
        0, [ItemResult(0, "s", None, invalid("no")), ItemResult(1, "t", outputs, None)]
    )
    with np.load(next(tmp_path.glob("part*")), allow_pickle=False) as arrays:
        found = {name: arrays[name].tolist() for name in arrays}
    assert found == {
        "item": [0, 1],
        "source": ["s", "t"],
        "failed": [True, False],
        "error": ["no"],
        "B": [[0.0, 0.0], [1.0, 2.0]],
        "V": [1, 2, 3],
        "V.shape": [[-1], [3]],
        "C": [120, 0],
        "C.length": [[0], [2]],
    }


@pytest.mark.parametrize("format", ["npz", "parquet"])
def test_what_does_not_fit_a_column_is_a_failure(tmp_path: Path, format: str) -> None:
    output = JobOutput(tmp_path, format, NUMBERS)
    stray = ItemResult(1, "s", [Tensor("Z", "FP32", [1], bytes(4))], None)
    torn = ItemResult(3, "s", [Tensor("Y", "FP32", [1, 2], bytes(4))], None)
    wrong = ItemResult(4, "s", [Tensor("Y", "INT8", [1, 2], bytes(2))], None)
    assert output.write(0, [one(0, 1, 2, 3), stray, one(2, 1, 2), torn, wrong]) == 4
    assert list(output.failures()) == [(0, [0, 1, 3, 4])]


@pytest.mark.parametrize("format", FORMATS)
def test_names_that_a_format_has_itself(tmp_path: Path, format: str) -> None:
    declared = model(outputs={"error": ("FP32", [2])}).output
    if format == "jsonl":
        output = JobOutput(tmp_path, format, declared)
        output.write(0, [ItemResult(0, "s", [Tensor("error", "FP32", [1, 2], bytes(8))], None)])
        assert list(output.failures()) == []
    else:
        with pytest.raises(WeirError, match="write JSON Lines"):
            JobOutput(tmp_path, format, declared)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = (JobOutput(tmp_path, "jsonl", NUMBERS) for _ in range(2))
    first.write(0, [one(0, 1, 2), one(1, 1, 2)])
    with pytest.raises(WeirError, match="written up to item 2, not 0"):
        second.write(0, [one(0, 1, 2)])
    with pytest.raises(WeirError, match="not in order"):
        second.write(2, [one(3, 1, 2)])
    with pytest.raises(WeirError, match="not in order"):
        second.write(2, [])
    with pytest.raises(WeirError, match="no shard begins"):
        second.rewrite(1, [one(1, 1, 2)])
    assert [name for name in os.listdir(tmp_path) if name.startswith("part")] == ["part-0000000000-0000000001.jsonl"]
    assert not list(tmp_path.glob(".part*"))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["part-0000000001-0000000002.jsonl"], "from 0 on"),
        (["part-0000000000-0000000002.jsonl", "part-0000000004-0000000005.jsonl"], "from 3 on"),
        (["part-0000000000-0000000002.jsonl", "part-0000000002-0000000005.jsonl"], "from 3 on"),
        (["part-0000000000-0000000002.npz"], "another format"),
    ],
)
def test_a_folder_of_other_shards_is_refused(tmp_path: Path, names: list[str], why: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(WeirError, match=why) as refused:
        JobOutput(tmp_path, "jsonl", NUMBERS).covered()
    assert refused.value.code is ErrorCode.INVALID_ARG


def test_a_full_disk_pauses_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = JobOutput(tmp_path, "jsonl", NUMBERS)
    output.write(0, [one(0, 1, 2)])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(WeirError, match="No space left on device") as told:
            output.write(1, [one(1, 1, 2)])
    assert told.value.retryable
    assert output.covered() == 1
    assert not list(tmp_path.glob(".part*"))
    output.write(1, [one(1, 1, 2)])
    assert output.covered() == 2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("content", [b"", b"garbage\n", b"PK\3\4", b"[1]\n", b'{"error":1}\n'])
def test_a_shard_that_is_none(tmp_path: Path, format: str, content: bytes) -> None:
    output = JobOutput(tmp_path, format, NUMBERS)
    (tmp_path / f"part-0000000000-0000000001.{format}").write_bytes(content)
    if not (format == "jsonl" and b"error" not in content):
        with pytest.raises(WeirError, match="is not a shard"):
            list(output.failures())
    if content or format != "jsonl":
        with pytest.raises(WeirError, match="is not a shard"):
            output.rewrite(0, [one(0, 1, 2)])


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeirError, match="can't be written"):
        JobOutput(tmp_path / "file" / "out", "jsonl", NUMBERS)
    with pytest.raises(WeirError, match="unknown output format 'csv'"):
        JobOutput(tmp_path, "csv", NUMBERS)


def test_outputs_are_inputs_again(tmp_path: Path) -> None:
    output = JobOutput(tmp_path / "out", "parquet", NUMBERS)
    output.write(0, [one(0, 1, 2)])
    with pytest.raises(WeirError, match="column 'item' is not an input"):
        open_input([tmp_path / "out"], None, model(Y=("FP32", [2])), InProcess())
