"""Where `weir serve` keeps its data: by project and port, but where data of the port is, there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.commands.local.data_folders import (
    PROJECT_MARKS,
    DataFolder,
    choose_data_dir,
    default_data_dir,
    project_folder,
)

PORTS = st.integers(1, 65535)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..")
)
PROJECTS = st.lists(NAMES, max_size=3).map(lambda names: Path("/", *names))
HOME = Path("/nowhere")


@given(PROJECTS, PORTS, PROJECTS, PORTS)
def test_each_project_and_port_has_one_folder_of_its_own(one: Path, port: int, other: Path, other_port: int) -> None:
    first, second = choose_data_dir(HOME, port, one), choose_data_dir(HOME, other_port, other)
    assert (first == second) == ((one, port) == (other, other_port))
    assert first == choose_data_dir(HOME, port, one)


@given(PROJECTS, PORTS)
def test_the_name_of_a_folder_can_be_read_and_typed(project: Path, port: int) -> None:
    path, is_of_port = choose_data_dir(HOME, port, project)
    assert (path.parent, is_of_port) == (HOME, False)
    assert path.name.isascii()
    assert path.name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    assert not path.name.startswith((".", "-"))
    assert path.name.endswith(f"-{port}")
    assert len(path.name) < 64


def test_data_of_the_port_is_found_after_an_upgrade(tmp_path: Path) -> None:
    project = tmp_path / "shop"
    own = choose_data_dir(tmp_path, 8000, project)
    assert (own.path.parent, own.is_of_port) == (tmp_path, False)
    assert own.path.name.startswith("shop-")
    (tmp_path / "8000").mkdir()
    assert choose_data_dir(tmp_path, 8000, project) == DataFolder(tmp_path / "8000", True)
    assert choose_data_dir(tmp_path, 8000, tmp_path / "other") == DataFolder(tmp_path / "8000", True)
    assert choose_data_dir(tmp_path, 8001, project).is_of_port is False
    own.path.mkdir()
    assert choose_data_dir(tmp_path, 8000, project) == own, "a project that has data keeps it"


def test_the_project_is_the_nearest_folder_with_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "repository" / "services" / "inner"
    (inner / "deep").mkdir(parents=True)
    monkeypatch.chdir(inner / "deep")
    assert project_folder() in (inner / "deep", *_marked_above(tmp_path)), "without a mark it is the current folder"
    (tmp_path / "repository" / PROJECT_MARKS[0]).touch()  # as in a worktree
    assert project_folder() == tmp_path / "repository"
    (inner / PROJECT_MARKS[-1]).touch()
    assert project_folder() == inner
    monkeypatch.chdir(tmp_path / "repository" / "services")
    assert project_folder() == tmp_path / "repository"


def _marked_above(folder: Path) -> list[Path]:
    return [above for above in folder.parents if any((above / mark).exists() for mark in PROJECT_MARKS)]


def test_folders_of_a_project_share_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    (tmp_path / "shop" / "models").mkdir(parents=True)
    (tmp_path / "shop" / ".git").mkdir()
    monkeypatch.chdir(tmp_path / "shop")
    first = default_data_dir(8000)
    monkeypatch.chdir("models")
    assert default_data_dir(8000) == first
    assert first.path.parent == tmp_path / "share" / "weir"


def test_a_current_folder_that_was_deleted_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    assert project_folder() is None
    assert default_data_dir(8000) == DataFolder(tmp_path / "share" / "weir" / "8000", True)
    monkeypatch.chdir(tmp_path)
