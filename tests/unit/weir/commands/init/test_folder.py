"""Folders of models: written as a whole, and never over a model unless that is wanted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from weir.commands.init.folder import ModelFolder, Sample, write_folder
from weir.errors import StartError


def folder(file: Path, config: str = "first", name: str = "net") -> ModelFolder:
    return ModelFolder(name, config, Sample("sample.json", b"{}", None), {"1/model.onnx": file})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"content")
    return path


def files_in(repository: Path) -> dict[str, bytes]:
    return {str(path.relative_to(repository)): path.read_bytes() for path in repository.rglob("*") if path.is_file()}


@pytest.mark.parametrize("links", [False, True])
def test_a_folder_is_made_with_its_repository(file: Path, tmp_path: Path, links: bool) -> None:
    repository = tmp_path / "deep" / "models"
    assert write_folder(folder(file), repository, links=links, replaces=False) == repository / "net"
    assert files_in(repository) == {
        "net/1/model.onnx": b"content", "net/config.pbtxt": b"first", "net/sample.json": b"{}",
    }  # fmt: skip
    assert os.path.samefile(repository / "net/1/model.onnx", file) == links
    # Servers may run as another user.
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((repository / "net").stat().st_mode) == 0o777 & ~umask


def test_a_model_is_replaced_only_by_force(file: Path, tmp_path: Path) -> None:
    write_folder(folder(file), tmp_path, links=False, replaces=False)
    (tmp_path / "net" / "labels.txt").write_text("cat")
    with pytest.raises(StartError, match="exists already: choose another --name, or replace its files with --force"):
        write_folder(folder(file, "second"), tmp_path, links=False, replaces=False)
    assert (tmp_path / "net" / "config.pbtxt").read_text() == "first"
    file.write_bytes(b"other")
    write_folder(folder(file, "second"), tmp_path, links=False, replaces=True)
    assert files_in(tmp_path / "net") == {
        "1/model.onnx": b"other", "config.pbtxt": b"second", "sample.json": b"{}", "labels.txt": b"cat",
    }  # fmt: skip


def test_nothing_is_left_where_a_file_cannot_be_copied(file: Path, tmp_path: Path) -> None:
    broken = ModelFolder("net", "first", None, {"1/model.onnx": file, "1/weights": tmp_path / "missing"})
    with pytest.raises(StartError, match="missing can't be copied"):
        write_folder(broken, tmp_path / "models", links=False, replaces=False)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_repository_that_is_no_folder_is_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"net\.onnx/net can't be written"):
        write_folder(folder(file), tmp_path / "net.onnx", links=False, replaces=False)
