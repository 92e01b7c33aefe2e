"""Folders of processes: made beside others that remove what dead processes have left."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from weir.runtime import locked_folder
from weir.runtime.locked_folder import LockedFolder, remove_abandoned_folders


def test_a_folder_that_another_process_removed_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its locking a new folder looks like one that was left."""
    flock = fcntl.flock
    removals = iter([True, True, False])

    def lock_after_removal(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and next(removals):
            remove_abandoned_folders("test-", tmp_path)
        flock(fd, operation)

    monkeypatch.setattr(locked_folder.fcntl, "flock", lock_after_removal)
    folder = LockedFolder("test-", tmp_path)
    assert folder.path.is_dir()
    monkeypatch.undo()
    remove_abandoned_folders("test-", tmp_path)
    assert folder.path.is_dir(), "it is locked"
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_removed_repeatedly_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def lock_after_removal(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            remove_abandoned_folders("test-", tmp_path)
        flock(fd, operation)

    monkeypatch.setattr(locked_folder.fcntl, "flock", lock_after_removal)
    with pytest.raises(OSError, match="removed each of 10 new folders"):
        LockedFolder("test-", tmp_path)
