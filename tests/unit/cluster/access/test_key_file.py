"""The file of keys: private, replaced as a whole, and changed by one process at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from weir.access.keys.ring import KeyRing
from weir.cluster.access.key_file import KeyFile

NOW_S = 1_800_000_000.0


def add(name: str, ring: KeyRing) -> KeyRing:
    return ring.create(name, ["r"], NOW_S)[0]


def names(file: KeyFile) -> set[str]:
    return {record.name for record in file.ring().records}


def test_the_file_is_private_and_keeps_its_mode(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    assert names(file) == set()
    file.change(lambda ring: add("a", ring))
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "keys.json").chmod(0o640)
    file.change(lambda ring: add("b", ring))
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o640
    assert names(file) == {"a", "b"}
    assert {path.name for path in tmp_path.iterdir()} == {"keys.json", "keys.json.lock"}


def test_the_file_behind_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("keys.json")
    KeyFile(tmp_path / "link").change(lambda ring: add("a", ring))
    assert (tmp_path / "link").is_symlink()
    assert names(KeyFile(tmp_path / "keys.json")) == {"a"}


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.change(lambda ring: add("a", ring))
    before = (tmp_path / "keys.json").read_bytes()
    with pytest.raises(ValueError, match="no key of the name"):
        file.change(lambda ring: ring.revoke("b"))
    (tmp_path / "keys.json").write_text('{"keys": [{"id": 7}]}')
    with pytest.raises(ValueError, match=r"\$\.keys\[0\]\.id"):
        file.change(lambda ring: add("b", ring))
    assert before
    assert (tmp_path / "keys.json").read_text() == '{"keys": [{"id": 7}]}'


def test_changes_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    wanted = {f"n{number}" for number in range(20)}
    threads = [
        threading.Thread(target=KeyFile(tmp_path / "keys.json").change, args=(lambda ring, name=name: add(name, ring),))
        for name in wanted
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(KeyFile(tmp_path / "keys.json")) == wanted
