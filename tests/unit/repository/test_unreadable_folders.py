"""A folder that can't be read is the problem of its model alone: the others are found and read as ever."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weir.repository.layout import FoundModel, ModelRepository
from weir.repository.loading import read_config
from weir.schemas.core.errors import WeirError


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the models `good` and `net`, both of version 1."""
    for name in ("good", "net"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").touch()
        (tmp_path / name / "config.pbtxt").write_text("max_batch_size: 2")
    return tmp_path


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Has the system refuse to list or look into a folder: tests may run as a user whom mode bits do not stop."""
    forbidden: list[Path] = []

    def refusing(call: Callable[..., object], is_inside: bool) -> Callable[..., object]:
        def refuse(path: object, *arguments: object, **named: object) -> object:
            shown = Path(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else Path()
            if any(folder in shown.parents or (not is_inside and folder == shown) for folder in forbidden):
                raise PermissionError(13, os.strerror(13), str(path))
            return call(path, *arguments, **named)

        return refuse

    monkeypatch.setattr(os, "scandir", refusing(os.scandir, is_inside=False))
    monkeypatch.setattr(os, "open", refusing(os.open, is_inside=True))
    monkeypatch.setattr(os, "stat", refusing(os.stat, is_inside=True))
    return forbidden.append


def problem_of(root: Path, name: str = "net") -> str:
    """Why `name` can't be served, after a look that must find `good` in order."""
    models = ModelRepository([root]).snapshot().models
    assert read_config(models["good"]).config.max_batch_size == 2
    with pytest.raises(WeirError) as caught:
        read_config(models[name])
    assert str(root) not in caught.value.message
    return caught.value.message


def test_a_folder_that_must_not_be_listed(repository: Path, forbid: Callable[[Path], None]) -> None:
    forbid(repository / "net")
    assert problem_of(repository) == "failed to read the folder of model 'net': Permission denied"
    assert ModelRepository([repository]).find("net").problem


def test_a_version_folder_that_must_not_be_listed(repository: Path, forbid: Callable[[Path], None]) -> None:
    forbid(repository / "net" / "1")
    assert "failed to read version 1 of model 'net': Permission denied" in problem_of(repository)


def test_a_configuration_that_is_a_folder(repository: Path) -> None:
    (repository / "net" / "config.pbtxt").unlink()
    (repository / "net" / "config.pbtxt").mkdir()
    reason = "failed to read the configuration of model 'net': config.pbtxt is not a regular file"
    assert problem_of(repository) == reason


def test_a_configuration_that_is_a_pipe_is_not_waited_for(repository: Path) -> None:
    (repository / "net" / "config.pbtxt").unlink()
    os.mkfifo(repository / "net" / "config.pbtxt")
    assert "is not a regular file" in problem_of(repository)


def test_links_that_lead_in_circles_or_nowhere(repository: Path) -> None:
    (repository / "circle").symlink_to("circle")
    (repository / "nowhere").symlink_to("not/there")
    (repository / "net" / "2").symlink_to("2")
    assert "Too many levels of symbolic links" in problem_of(repository, "circle")
    assert "No such file or directory" in problem_of(repository, "nowhere")
    assert ModelRepository([repository]).find("net").versions == (1, 2)


def test_a_file_in_the_place_of_a_version_is_no_version(repository: Path) -> None:
    (repository / "net" / "2").touch()
    (repository / "file").touch()
    found = ModelRepository([repository]).snapshot().models
    assert list(found) == ["good", "net"]
    assert found["net"].versions == (1,)


def test_a_name_that_is_not_utf_8(repository: Path) -> None:
    os.mkdir(os.fsencode(repository) + b"/b\xffd")
    os.mkdir(os.fsencode(repository) + b"/net/v\xff")
    found = ModelRepository([repository]).snapshot().models
    assert list(found) == ["b\\xffd", "good", "net"]
    assert "invalid model name" in found["b\\xffd"].problem
    assert found["net"].ignored == ("v\\xff",)
    for name in found:
        name.encode()


def test_a_folder_that_is_removed_during_a_snapshot(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def vanishing(path: Path) -> object:
        if Path(path) == repository / "net":
            os.rename(path, repository.parent / f"{repository.name}-gone")
        return listed(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    models = ModelRepository([repository]).snapshot().models
    assert models["good"] == FoundModel("good", repository / "good", "config.pbtxt", (1,))
    assert "net" not in models or models["net"].problem
    assert "net" not in ModelRepository([repository]).snapshot().models


def test_a_repository_that_can_not_be_read_leaves_the_others(repository: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    snapshot = ModelRepository([absent, repository]).snapshot()
    assert list(snapshot.models) == ["good", "net"]
    assert snapshot.unreadable == {absent: "failed to read model repository 'absent': No such file or directory"}
