"""Folders of processes: made beside others that remove what dead processes have left."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from weir.runtime.folders import locked
from weir.runtime.folders.locked import LOCK, LockedFolder, is_held, remove_abandoned_folders


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

    monkeypatch.setattr(locked.fcntl, "flock", lock_after_removal)
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

    monkeypatch.setattr(locked.fcntl, "flock", lock_after_removal)
    with pytest.raises(OSError, match="removed each of 10 new folders"):
        LockedFolder("test-", tmp_path)


def test_a_folder_is_held_while_its_process_runs(tmp_path: Path) -> None:
    assert not is_held(tmp_path), "it has no lock"
    held = LockedFolder("test-", tmp_path)
    assert is_held(held.path)
    assert is_held(held.path), "to ask changes nothing"
    held.remove()
    assert not is_held(held.path)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    """Its process id may be another's by then; the kernel has released its lock."""
    lines = f"folder = LockedFolder('test-', Path({str(tmp_path)!r})); print(folder.path, flush=True); input()"
    code = f"from pathlib import Path; from weir.runtime.folders.locked import LockedFolder; {lines}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert is_held(folder)
        remove_abandoned_folders("test-", tmp_path)
        assert folder.is_dir()
        process.kill()
    assert not is_held(folder)
    remove_abandoned_folders("test-", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_who_looks_does_not_keep_a_process_from_its_lock(tmp_path: Path) -> None:
    folder = LockedFolder("test-", tmp_path)
    folder_path, lock = folder.path, folder.path / LOCK
    assert is_held(folder_path)
    folder.remove()
    folder_path.mkdir()
    with lock.open("w") as first:
        assert not is_held(folder_path)
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_held(folder_path)


def test_the_lock_of_a_link_is_not_looked_at(tmp_path: Path) -> None:
    held = LockedFolder("test-", tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOCK).symlink_to(held.path / LOCK)
    assert not is_held(tmp_path / "other")
    held.remove()
