"""`OverrideFolder`: the files of load requests are written, and removed completely."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from weir.runtime.folders.locked import remove_abandoned_folders
from weir.schemas.core.errors import WeirError
from weir.worker.lifecycle.override_folder import PREFIX, OverrideFolder


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_files_are_in_a_folder_with_the_name_of_the_model(scratch: Path) -> None:
    folder = OverrideFolder("m", {"1/model.py": b"code", "1/deep/er/x": b"", "labels.txt": b"cat"})
    assert folder.path.name == "m"
    assert (folder.path / "1" / "model.py").read_bytes() == b"code"
    assert (folder.path / "1" / "deep" / "er" / "x").exists()
    folder.remove()
    folder.remove()
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("path", ["../x", "1/../../x", "/x", "", ".", "1/..", "1/", "..\\x", "1/\0"])
def test_a_path_outside_of_the_folder_is_rejected(scratch: Path, path: str) -> None:
    with pytest.raises(WeirError, match="must stay within model directory"):
        OverrideFolder("m", {"1/ok": b"", path: b""})
    assert not list(scratch.iterdir())


def test_a_conflict_of_file_and_folder_is_rejected(scratch: Path) -> None:
    with pytest.raises(WeirError, match="could not be written"):
        OverrideFolder("m", {"1": b"", "1/model.py": b""})
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("name", ["../m", "", "a/b"])
def test_a_model_name_with_a_path_is_rejected(scratch: Path, name: str) -> None:
    with pytest.raises(WeirError):
        OverrideFolder(name, {"1/x": b""})
    assert not list(scratch.iterdir())


def test_only_folders_of_dead_workers_are_removed(scratch: Path) -> None:
    living = OverrideFolder("m", {"1/x": b""})
    dead = scratch / "weir-model-dead"
    (dead / "m").mkdir(parents=True)
    (dead / ".lock").touch()
    (scratch / "weir-model-somebody-elses").mkdir()
    remove_abandoned_folders(PREFIX)
    assert not dead.exists()
    assert living.path.exists()
    living.remove()
