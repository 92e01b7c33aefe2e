"""A folder of this user: no other user of the machine can lead a process elsewhere, or read what it writes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from weir.runtime.folders.private import private_folder, write_private


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which every user may write, as /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_missing_folders_are_created_for_this_user_alone(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert made == tmp_path.resolve() / "a" / "b"
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (made, made.parent)] == [0o700, 0o700]
    assert private_folder(made) == private_folder(made, creates=False) == made


def test_nothing_is_created_by_who_only_looks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        private_folder(tmp_path / "a" / "b", creates=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_last", [True, False])
def test_a_link_in_a_shared_folder_is_not_followed(shared: Path, tmp_path: Path, is_last: bool) -> None:
    private_folder(tmp_path / "mine" / "inner")
    (shared / "weir").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="weir is a link, in a folder where every user may write"):
        private_folder(shared / "weir" if is_last else shared / "weir" / "inner")


def test_a_dangling_link_in_a_shared_folder_creates_nothing(shared: Path, tmp_path: Path) -> None:
    (shared / "weir").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="is a link"):
        private_folder(shared / "weir" / "servers")
    assert not (tmp_path / "nothing").exists()


def test_a_link_of_this_user_may_lead_to_another_disk(tmp_path: Path) -> None:
    large = private_folder(tmp_path / "large" / "disk")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "weir").symlink_to("../large/disk")
    assert private_folder(tmp_path / "home" / "weir" / "servers") == large / "servers"
    (tmp_path / "home" / "absolute").symlink_to(large)
    assert private_folder(tmp_path / "home" / "absolute" / ".." / "disk") == large


def test_a_link_to_a_link_in_a_shared_folder_is_not_followed(shared: Path, tmp_path: Path) -> None:
    private_folder(tmp_path / "mine")
    (shared / "weir").symlink_to(tmp_path / "mine")
    (tmp_path / "weir").symlink_to(shared / "weir")
    with pytest.raises(OSError, match="is a link"):
        private_folder(tmp_path / "weir")


def test_a_link_to_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "weir").symlink_to("weir")
    with pytest.raises(OSError, match="more than 40 links"):
        private_folder(tmp_path / "weir")


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_others_may_not_enter(tmp_path: Path, mode: int) -> None:
    private_folder(tmp_path / "weir").chmod(mode)
    with pytest.raises(OSError, match="not a folder that only this user may enter"):
        private_folder(tmp_path / "weir")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weir").touch(0o600)
    with pytest.raises(OSError, match="not a folder that only this user may enter"):
        private_folder(tmp_path / "weir")


def test_the_folder_of_another_user_is_not_entered(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (shared / "weir", tmp_path / "weir"):
        private_folder(folder)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(OSError, match="not a folder that only this user may enter"):
        private_folder(tmp_path / "weir")
    with pytest.raises(OSError, match=r"belongs to another user, in a folder where|only this user may enter"):
        private_folder(shared / "weir")


def test_a_private_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_private(path, "first")
    with path.open() as before:
        write_private(path, "second")
        assert before.read() == "first", "who reads has one text or the other"
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
