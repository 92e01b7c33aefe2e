"""Which files are a job's, in which order; and folders whose files are the items."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.gateway.job_models import model
from weir.jobs.formats import input_files as file_folder
from weir.jobs.formats.files import default_output_format, open_input
from weir.jobs.formats.input_files import find_input_files
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import Tensor

STRINGS = model(X=("BYTES", [1]))
NUMBERS = model(X=("FP32", [1]))


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def names(*paths: object) -> list[str]:
    return [file.name for file in find_input_files([str(path) for path in paths])]


def test_the_order_of_files(tmp_path: Path) -> None:
    make(tmp_path, "b/2", "b/10", "b.txt", "a/deep/er/x", "a/.hidden", ".folder/y", "c-d/1", "c/1")
    everything = ["a/deep/er/x", "b/10", "b/2", "b.txt", "c/1", "c-d/1"]
    assert names(tmp_path) == everything
    assert names(tmp_path / "b" / "2") == ["2"]
    assert names(tmp_path / "*" / "1") == ["c-d/1", "c/1"]
    assert names(tmp_path / "**" / "1*") == ["b/10", "c-d/1", "c/1"]
    assert names(tmp_path / "c", tmp_path / "b") == ["b/10", "b/2", "c/1"]
    assert names(tmp_path / "b", tmp_path / "b" / "2") == ["10", "2"]


def test_a_name_may_look_like_a_pattern(tmp_path: Path) -> None:
    make(tmp_path, "a[1].txt", "a1.txt")
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_paths_that_name_nothing(tmp_path: Path) -> None:
    for path in ("missing", "*.txt"):
        with pytest.raises(WeirError, match=r"does not exist|no file matches") as refused:
            find_input_files([tmp_path / path])
        assert refused.value.code is ErrorCode.NOT_FOUND
        assert str(tmp_path) not in refused.value.message
    for paths in ([tmp_path], []):
        with pytest.raises(WeirError, match="contains no files"):
            find_input_files(paths)


def content(config: ModelConfig, *paths: Path) -> list[tuple[str, object]]:
    def told(inputs: list[Tensor] | WeirError) -> object:
        if isinstance(inputs, WeirError):
            return inputs.message
        (tensor,) = inputs
        return tensor.datatype, tuple(tensor.shape), tensor.to_numpy().tolist()

    return [(item.source, told(item.inputs)) for item in open_input(paths, "files", config).items()]


def test_each_file_is_an_item(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b/c.png")
    (tmp_path / "empty").touch()
    assert content(STRINGS, tmp_path) == [
        ("a.txt", ("BYTES", (1, 1), [[b"a.txt"]])),
        ("b/c.png", ("BYTES", (1, 1), [[b"b/c.png"]])),
        ("empty", ("BYTES", (1, 1), [[b""]])),
    ]
    raw = ("a.txt", ("UINT8", (5,), list(b"a.txt")))
    assert content(model(0, X=("UINT8", [-1])), tmp_path)[0] == raw
    given = open_input([tmp_path], None, STRINGS)
    assert given.count() == 3
    assert [(item.number, item.source) for item in given.items(2)] == [(2, "empty")]
    print_before = given.fingerprint()
    make(tmp_path, "new")
    assert open_input([tmp_path], None, STRINGS).fingerprint() != print_before


def test_models_that_take_no_file(tmp_path: Path) -> None:
    make(tmp_path, "a")
    for config in (
        NUMBERS,
        model(X=("BYTES", [2])),
        model(X=("UINT8", [3])),
        model(X=("BYTES", [1]), Y=("BYTES", [1])),
    ):
        with pytest.raises(WeirError, match="a folder of files requires"):
            open_input([tmp_path], None, config)
    with pytest.raises(WeirError, match="declares no inputs"):
        open_input([tmp_path], None, model())
    assert content(model(X=("BYTES", [1]), Y=("FP32", [1], True)), tmp_path)


def test_links_that_lead_out_and_what_is_no_file(tmp_path: Path) -> None:
    make(tmp_path, "in/real", "secret")
    folder = tmp_path / "in"
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("../secret")
    (folder / "within").symlink_to("real")
    (folder / "broken").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "tree").symlink_to(".")
    os.mkfifo(folder / "pipe")
    found = dict(content(STRINGS, folder))
    assert found.pop("real") == found.pop("within") == ("BYTES", (1, 1), [[b"in/real"]])
    assert found == {
        "broken": "'broken' does not exist",
        "loop": found["loop"],
        "out": "'out' is a link to a file outside of the job's input",
        "pipe": "'pipe' is not a file",
        "tree": "'tree' is not a file",
        "up": "'up' is a link to a file outside of the job's input",
    }
    assert "loop" in str(found["loop"])


def test_files_that_are_gone_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a", "b", "larger")
    monkeypatch.setattr(file_folder, "MAX_ITEM_BYTES", 5)
    given = open_input([tmp_path], "files", STRINGS)
    (tmp_path / "a").unlink()
    items = list(given.items())
    assert [item.inputs.message for item in items if isinstance(item.inputs, WeirError)] == [
        "'a' does not exist",
        "'larger' is larger than 5 bytes",
    ]


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff")).write_bytes(b"x")
    assert content(STRINGS, tmp_path) == [("a\\xff", ("BYTES", (1, 1), [[b"x"]]))]
    with pytest.raises(WeirError) as refused:
        find_input_files([os.fspath(tmp_path / os.fsdecode(b"b\xff"))])
    refused.value.message.encode()


def test_the_format_follows_from_the_suffix(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.JSONL", "c.ndjson", "other/d.txt")
    files = [tmp_path / name for name in ("a.jsonl", "b.JSONL", "c.ndjson")]
    assert default_output_format(files, None) == "jsonl"
    assert default_output_format([tmp_path], None) == "jsonl"
    assert default_output_format([tmp_path], "parquet") == "parquet"
    assert default_output_format([tmp_path], "npy") == "npz"
    assert [item.source for item in open_input(files, None, NUMBERS).items()] == [
        "a.jsonl:1",
        "b.JSONL:1",
        "c.ndjson:1",
    ]
    assert open_input([tmp_path], "jsonl", NUMBERS).count() == 3
    assert open_input([tmp_path], None, STRINGS).count() == 4
    with pytest.raises(WeirError, match=r"does not follow from the suffix of 'd.txt'"):
        open_input([tmp_path / "other" / "d.txt"], None, NUMBERS)
    with pytest.raises(WeirError, match="contains no files of format 'npy'"):
        open_input([tmp_path], "npy", NUMBERS)
    with pytest.raises(WeirError, match="unknown input format 'csv'"):
        open_input([tmp_path], "csv", NUMBERS)
