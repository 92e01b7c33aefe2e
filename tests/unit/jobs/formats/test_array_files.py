"""Items in arrays of numpy and in Parquet: rows of every type, and files that are not as they should be."""

from __future__ import annotations

import builtins
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.job_models import ALL, InProcess, model, value
from weir.jobs.formats import npy as numpy_files
from weir.jobs.formats import parquet_rows
from weir.jobs.formats.files import open_input
from weir.jobs.formats.items import JobItem
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError


def told(item: JobItem) -> Any:
    if isinstance(item.inputs, WeirError):
        return item.inputs.message
    return {tensor.name: (tensor.datatype, tuple(tensor.shape), tensor.to_numpy().tolist()) for tensor in item.inputs}


def save(path: Path, *arrays: np.ndarray, compressed: bool = False, **named: np.ndarray) -> Path:
    if arrays:
        np.save(path, arrays[0])
    elif compressed:
        np.savez_compressed(path, **named)
    else:
        np.savez(path, **named)
    return path


@pytest.mark.parametrize("datatype", [name for name in ALL if name != "BYTES"])
def test_rows_of_each_type(tmp_path: Path, datatype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_files, "BLOCK_BYTES", 64)
    whole = value(np.random.default_rng(1), "X", datatype, (50, 2, 3))
    files = [
        save(tmp_path / "a.npy", whole.to_numpy()),
        save(tmp_path / "b.npz", X=whole.to_numpy()),
        save(tmp_path / "c.npz", X=whole.to_numpy(), compressed=True),
    ]
    given = open_input(files, None, model(X=(datatype, [2, -1])))
    assert given.count() == 150
    for start in (0, 1, 49, 50, 99, 120, 149, 150):
        items = list(given.items(start))
        assert [item.number for item in items] == list(range(start, 150))
        size = len(whole.data) // 50
        for item in items:
            row = item.number % 50
            assert not isinstance(item.inputs, WeirError)
            assert item.source == f"{'abc'[item.number // 50]}.np{'yzz'[item.number // 50]}[{row}]"
            assert tuple(item.inputs[0].shape) == (1, 2, 3)
            assert item.inputs[0].data == whole.data[size * row : size * (row + 1)]


def test_strings_other_byte_orders_and_several_inputs(tmp_path: Path) -> None:
    save(
        tmp_path / "a.npz",
        S=np.array(["é", "ab"]),
        B=np.array([[b"x", b"yz"], [b"", b"w"]]),
        N=np.array([1, 2], ">i4"),
        V=np.array([1.5, 2.5], np.float16),
    )
    config = model(S=("BYTES", [1]), B=("BYTES", [2]), N=("INT32", [1]), V=("FP16", [1]), O=("FP32", [1], True))
    assert [told(item) for item in open_input([tmp_path], None, config).items()] == [
        {
            "S": ("BYTES", (1, 1), [["é".encode()]]),
            "B": ("BYTES", (1, 2), [[b"x", b"yz"]]),
            "N": ("INT32", (1, 1), [[1]]),
            "V": ("FP16", (1, 1), [[1.5]]),
        },
        {
            "S": ("BYTES", (1, 1), [[b"ab"]]),
            "B": ("BYTES", (1, 2), [[b"", b"w"]]),
            "N": ("INT32", (1, 1), [[2]]),
            "V": ("FP16", (1, 1), [[2.5]]),
        },
    ]


ONE = model(X=("FP32", [2]))
ZEROS = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros((3, 2)), "holds float64, but input 'X' is FP32"),
        (np.zeros((3, 2), np.complex64), "holds complex64"),
        (np.zeros((3, 2), [("a", "f4")]), "holds"),
        (np.array(["a"]), "holds <U1"),
        (np.zeros((3, 3), np.float32), "rows of shape [3], but input 'X' requires [2]"),
        (np.zeros((3, 2, 2, 2), np.float32), "does not fit input 'X' with dims [2]"),
        (np.float32(1), "has no rows"),
        (np.zeros((3, 0), np.float32), "rows of 0 bytes"),
        (np.asfortranarray(np.zeros((3, 2), np.float32)), "Fortran order"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, array: np.ndarray, why: str) -> None:
    for file in (save(tmp_path / "a.npy", array), save(tmp_path / "b.npz", X=array)):
        with pytest.raises(WeirError) as refused:
            open_input([file], None, ONE)
        assert why in refused.value.message


def test_objects_are_never_loaded(tmp_path: Path) -> None:
    # Saving them needs pickle, so the header is written by hand.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (3, 2)})
    (tmp_path / "a.npy").write_bytes(header.getvalue() + bytes(100))
    with pytest.raises(WeirError, match="holds object"):
        open_input([tmp_path], None, ONE)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"X": ZEROS, "Z": ZEROS}, "array 'Z' is not an input of the model"),
        ({"arr_0": ZEROS}, "array 'arr_0' is not an input of the model; its inputs are ['X']"),
        ({}, "array 'X' is missing"),
    ],
)
def test_archives_of_other_arrays(tmp_path: Path, arrays: Mapping[str, np.ndarray], why: str) -> None:
    with pytest.raises(WeirError) as refused:
        open_input([save(tmp_path / "a.npz", **arrays)], None, ONE)
    assert why in refused.value.message


def test_arrays_for_several_inputs(tmp_path: Path) -> None:
    two = model(X=("FP32", [2]), Y=("FP32", [2]))
    with pytest.raises(WeirError, match=r"give them as a \.npz file"):
        open_input([save(tmp_path / "a.npy", ZEROS)], None, two)
    with pytest.raises(WeirError, match=r"different numbers of rows: \[2, 3\]"):
        open_input([save(tmp_path / "b.npz", X=ZEROS, Y=ZEROS[:2])], None, two)


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    file = save(tmp_path / "a.npy", ZEROS)
    whole = file.read_bytes()
    given = open_input([file], None, ONE)
    file.write_bytes(whole[:-4])
    assert ["truncated" in str(told(item)) for item in given.items(1)] == [True, True]
    with pytest.raises(WeirError, match="is truncated: it has 2 of 3 rows"):
        open_input([file], None, ONE)
    for size in (0, 5, 40):
        file.write_bytes(whole[:size])
        with pytest.raises(WeirError, match="is not a NumPy array"):
            open_input([file], None, ONE)


def test_an_archive_whose_content_is_broken(tmp_path: Path) -> None:
    file = save(tmp_path / "a.npz", X=np.ones((9000, 2), np.float32))
    broken = bytearray(file.read_bytes())
    broken[len(broken) // 2] ^= 1
    file.write_bytes(broken)
    items = list(open_input([file], None, ONE).items())
    assert len(items) == 9000
    assert "is broken" in str(told(items[-1]))
    whole = save(tmp_path / "b.npy", ZEROS).read_bytes()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("X.npy", whole)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("X.npy", whole)
    with pytest.raises(WeirError, match="contains an array twice"):
        open_input([file], None, ONE)


@settings(max_examples=100)
@given(data=st.data(), suffix=st.sampled_from([".npy", ".npz", ".parquet"]))
def test_whatever_is_in_a_file_nothing_else_is_raised(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, suffix: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    file = folder / f"good{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"X": ZEROS.tolist()}), file)
    else:
        save(file, *([ZEROS] if suffix == ".npy" else []), **({"X": ZEROS} if suffix == ".npz" else {}))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=8))
    file.write_bytes(content[: data.draw(st.integers(1, len(content)))] if data.draw(st.booleans()) else content)
    try:
        opened = open_input([file], None, ONE, InProcess())
        count = opened.count()
        assert count is not None
        if count < 1000:
            assert [item.number for item in opened.items()] == list(range(count))
    except WeirError:
        pass


# Parquet


def parquet(path: Path, config: ModelConfig, group_rows: int = 100, **columns: Any) -> list[Any]:
    pq.write_table(pa.table(columns), path / "a.parquet", row_group_size=group_rows)
    given = open_input([path / "a.parquet"], None, config, InProcess())
    items = list(given.items())
    assert given.count() == len(items)
    assert [item.number for item in items] == list(range(len(items)))
    assert [item.source for item in items] == [f"a.parquet[{row}]" for row in range(len(items))]
    for start in range(len(items)):
        assert [told(item) for item in given.items(start)] == [told(item) for item in items[start:]]
    return [told(item) for item in items]


@pytest.mark.parametrize(
    ("datatype", "type", "values"),
    [
        ("BOOL", pa.bool_(), [True, False]),
        ("UINT8", pa.int64(), [0, 255]),
        ("INT32", pa.int64(), [-1, 2**31 - 1]),
        ("UINT64", pa.uint64(), [0, 2**64 - 1]),
        ("FP16", pa.float32(), [0.5, -1.0]),
        ("FP32", pa.float64(), [0.5, -1.0]),
        ("FP64", pa.float64(), [0.1, 1e300]),
        ("FP32", pa.int32(), [1, 2]),
    ],
)
def test_columns_of_each_type(tmp_path: Path, datatype: str, type: pa.DataType, values: list[Any]) -> None:
    config = model(X=(datatype, [1]), Y=(datatype, [-1]))
    lists = pa.array([[], values], pa.list_(type))
    assert parquet(tmp_path, config, X=pa.array(values, type), Y=lists) == [
        {"X": (datatype, (1, 1), [[values[0]]]), "Y": (datatype, (1, 0), [[]])},
        {"X": (datatype, (1, 1), [[values[1]]]), "Y": (datatype, (1, 2), [values])},
    ]


def test_columns_of_strings_lists_of_lists_and_bf16(tmp_path: Path) -> None:
    config = model(S=("BYTES", [1]), D=("BYTES", [1]), L=("INT32", [2, -1]), F=("FP32", [2, 2]), H=("BF16", [1]))
    assert parquet(
        tmp_path,
        config,
        group_rows=1,
        S=["é", "b"],
        D=pa.array([b"\xff", b"x"]).dictionary_encode(),
        L=pa.array([[[1, 2, 3], [4, 5, 6]], [[], []]], pa.list_(pa.list_(pa.int32()))),
        F=pa.array([[1, 2, 3, 4]] * 2, pa.list_(pa.float32(), 4)),
        H=pa.array([1.0, -2.0], pa.float32()),
    ) == [
        {
            "S": ("BYTES", (1, 1), [["é".encode()]]),
            "D": ("BYTES", (1, 1), [[b"\xff"]]),
            "L": ("INT32", (1, 2, 3), [[[1, 2, 3], [4, 5, 6]]]),
            "F": ("FP32", (1, 2, 2), [[[1, 2], [3, 4]]]),
            "H": ("BF16", (1, 1), [[0x3F80]]),
        },
        {
            "S": ("BYTES", (1, 1), [[b"b"]]),
            "D": ("BYTES", (1, 1), [[b"x"]]),
            "L": ("INT32", (1, 2, 0), [[[], []]]),
            "F": ("FP32", (1, 2, 2), [[[1, 2], [3, 4]]]),
            "H": ("BF16", (1, 1), [[0xC000]]),
        },
    ]


def test_rows_that_do_not_fit_are_items_in_error(tmp_path: Path) -> None:
    config = model(X=("INT8", [-1, 2]), N=("INT8", [1]), O=("INT8", [1], True))
    assert parquet(
        tmp_path,
        config,
        X=pa.array(
            [[[1, 2]], [[1, 2], [3]], None, [[1, None]], [[300, 1]], [None], [[3, 4]]], pa.list_(pa.list_(pa.int64()))
        ),
        N=[0] * 6 + [None],
        O=[None, None, 1, 1, 1, 1, 1],
    ) == [
        {"X": ("INT8", (1, 1, 2), [[[1, 2]]]), "N": ("INT8", (1, 1), [[0]])},
        "column 'X': lists of unequal lengths are not a tensor",
        "column 'X' is null",
        "column 'X': a value within a list is null",
        "column 'X': Integer value 300 not in range: -128 to 127",
        "column 'X': a list within a list is null",
        "column 'N' is null",
    ]


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    for columns, why in (
        ({"Z": [1]}, "column 'Z' is not an input"),
        ({"X": ["a"]}, "column 'X' holds string, but the input is FP32"),
        ({"X": pa.array([{"a": 1}])}, "column 'X' holds struct"),
        ({"X": [[[[1.0]]]]}, "nests 3 lists, but the input's dims are [2]"),
    ):
        with pytest.raises(WeirError) as refused:
            parquet(tmp_path, ONE, **columns)
        assert why in refused.value.message
    (tmp_path / "b.parquet").write_bytes(b"PAR1 it is not PAR1")
    with pytest.raises(WeirError, match=r"'b\.parquet' is not a Parquet file"):
        open_input([tmp_path / "b.parquet"], None, ONE, InProcess())


def test_a_group_of_rows_that_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    values = np.arange(300, dtype=np.float32)
    table = pa.table({"X": values})
    pq.write_table(table, file, row_group_size=100, compression="zstd", use_dictionary=False, write_page_checksum=True)
    broken = bytearray(file.read_bytes())
    column = pq.ParquetFile(file).metadata.row_group(1).column(0)
    for place in range(column.data_page_offset + 40, column.data_page_offset + column.total_compressed_size):
        broken[place] ^= 0x55
    file.write_bytes(broken)
    found = [told(item) for item in open_input([file], None, model(X=("FP32", [1])), InProcess()).items()]
    assert len(found) == 300
    assert [type(row) for row in found] == [dict] * 100 + [str] * 100 + [dict] * 100
    assert "can't be read" in found[150]


def test_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_BATCH_ROWS", 3)
    found = parquet(tmp_path, model(X=("INT64", [1])), 7, X=list(range(20)))
    assert [row["X"][2] for row in found] == [[[number]] for number in range(20)]


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return imported(name, *rest, **named)

    (tmp_path / "a.parquet").touch()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(WeirError, match="extra parquet: pip install") as refused:
        open_input([tmp_path], None, ONE, InProcess())
    assert refused.value.code is ErrorCode.UNSUPPORTED
