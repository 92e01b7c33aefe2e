"""What SageMaker's archives hold, and the statuses that it expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from weir.gateway.platforms.multi_model import read_archive, status_of
from weir.schemas.core.errors import WeirError, internal, invalid, overloaded


def write(folder: Path, text: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)
    return folder


def failure(url: str, root: Path) -> str:
    with pytest.raises(WeirError) as caught:
        read_archive(url, root)
    return caught.value.message


def test_a_configuration_at_the_top(tmp_path: Path) -> None:
    model = write(tmp_path / "hash" / "model")
    assert read_archive(str(model), tmp_path) == (tmp_path / "hash", model, ())


def test_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "hash" / "model"
    (folder / "only" / "1").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    assert read_archive(str(folder), tmp_path) == (folder, folder / "only", ())


@pytest.mark.parametrize("platform", ['platform: "ensemble"', 'name: "x" platform:"ensemble"'])
def test_an_ensemble_with_its_models(tmp_path: Path, platform: str) -> None:
    first, whole, second = (tmp_path / name for name in ("a", "whole", "z"))
    write(first)
    write(whole, platform)
    write(second)
    assert read_archive(str(tmp_path), tmp_path.parent) == (tmp_path, whole, (first, second))


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    empty, several = tmp_path / "empty", tmp_path / "several"
    empty.mkdir()
    assert failure(str(empty), tmp_path) == f"failed to register '{empty}', it has no folder of a model"
    write(several / "a")
    write(several / "b")
    assert "it has 2 folders: expected one model, or one ensemble with its models" in failure(str(several), tmp_path)
    missing = tmp_path / "none"
    assert failure(str(missing), tmp_path) == f"failed to register '{missing}', repository not found"


@pytest.mark.parametrize("url", ["", "/", "/proc/self", "relative", "{root}/../other", "{root}/link"])
def test_folders_outside_are_rejected(tmp_path: Path, url: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    write(tmp_path / "other")
    (root / "link").symlink_to(tmp_path / "other")
    assert failure(url.format(root=root), root).endswith(f"it must be a folder in {root}")


def test_statuses() -> None:
    assert status_of(invalid("no such input")) == 400
    assert status_of(internal("some failure")) == 400
    assert status_of(internal("MemoryError: cannot allocate")) == 507
    assert status_of(internal("CUDA out of memory. Tried to allocate 2 GiB")) == 507
    assert status_of(overloaded("Exceeds maximum queue size")) == 503
