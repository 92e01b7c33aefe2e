"""Which changes of a model's folder are detected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weir.repository import layout
from weir.repository.layout import Fingerprint, ModelRepository, folder_fingerprint, model_fingerprint
from weir.schemas.core.errors import WeirError


def write(root: Path) -> None:
    for path in ("m/config.pbtxt", "m/1/model.py", "m/1/deep/weights", "m/2/model.py"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("content")


def look(root: Path) -> Fingerprint:
    return folder_fingerprint(ModelRepository([root]).find("m"))


@pytest.mark.parametrize(
    ("change", "is_shared", "versions"),
    [
        (lambda m: os.utime(m / "1/model.py", (1, 1)), False, {1}),
        (lambda m: os.utime(m / "config.pbtxt", (1, 1)), True, set()),
        (lambda m: (m / "1/deep/more").write_text(""), False, {1}),
        (lambda m: (m / "1/deep/weights").unlink(), False, {1}),
        (lambda m: (m / "labels.txt").write_text("cat"), True, set()),
        (lambda m: (m / "3").mkdir(), False, {3}),
        (lambda m: (m / "2/model.py").rename(m / "1/other.py"), False, {1, 2}),
        (lambda m: ((m / "1/__pycache__").mkdir(), (m / "1/__pycache__/x.pyc").touch()), False, set()),
        (lambda m: (m / ".hidden").touch(), False, set()),
        (lambda m: (m / "loop").symlink_to(m), True, set()),
    ],
)
def test_changes(tmp_path: Path, change: Callable[[Path], object], is_shared: bool, versions: set[int]) -> None:
    write(tmp_path)
    before = look(tmp_path)
    assert look(tmp_path) == before
    change(tmp_path / "m")
    after = look(tmp_path)
    assert (after.shared != before.shared) is is_shared
    numbers = before.versions.keys() | after.versions.keys()
    assert {n for n in numbers if before.versions.get(n) != after.versions.get(n)} == versions


def test_a_granted_permission_changes_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    found = ModelRepository([tmp_path]).snapshot().models
    (model,) = found.values()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: Path(path).name != model.config_file)
        before = model_fingerprint(model)
    assert model_fingerprint(model) != before
    assert model_fingerprint(model) == model_fingerprint(model)


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("m/1", "version 1 of model 'm' has more than 3 files"),
        ("m", "model 'm' has more than 3 files beside its versions"),
    ],
)
def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, problem: str) -> None:
    monkeypatch.setattr(layout, "MAX_FILES", 3)
    write(tmp_path)
    look(tmp_path).check_count("m")
    for number in range(9):
        (tmp_path / folder / f"file{number}").touch()
    found = look(tmp_path)
    assert max(len(found.shared), *map(len, found.versions.values())) == 4, "the others are not looked at"
    with pytest.raises(WeirError, match=problem):
        found.check_count("m")
