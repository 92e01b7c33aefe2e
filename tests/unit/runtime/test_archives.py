"""Archives are unpacked inside of their folder on every Python, with the filter of `tarfile` and without."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from weir.runtime.archives import unpack_tar

Members = Callable[[tarfile.TarFile], None]


@pytest.fixture(params=["filter", "no filter"] if hasattr(tarfile, "data_filter") else ["no filter"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where to unpack; once with Python's filter, if it has one, and once as before Python 3.11.4."""
    if request.param == "no filter":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    made = tmp_path / "into" / "folder"
    made.mkdir(parents=True)
    return made


def add(tar: tarfile.TarFile, name: str, type: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = type, link, mode
    member.uid, member.uname, member.gid, member.gname = 12345, "somebody", 12345, "somebody"
    tar.addfile(member)


def packed(tmp_path: Path, members: Members) -> Path:
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        members(tar)
    return archive


def test_files_folders_and_links_inside_are_unpacked(tmp_path: Path, folder: Path) -> None:
    def members(tar: tarfile.TarFile) -> None:
        add(tar, "bin", tarfile.DIRTYPE, mode=0o777)
        add(tar, "./bin/python3", mode=0o4777)
        add(tar, "bin/python", tarfile.SYMTYPE, "python3")
        add(tar, "lib/deep/link", tarfile.SYMTYPE, "../../bin/python3")
        add(tar, "hard", tarfile.LNKTYPE, "bin/python3", mode=0o4777)
        add(tar, "data", mode=0o062)
        add(tar, "dangling", tarfile.SYMTYPE, "nothing")
        add(tar, "/absolute")

    unpack_tar(packed(tmp_path, members), folder)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {
        "bin",
        "bin/python3",
        "bin/python",
        "lib",
        "lib/deep",
        "lib/deep/link",
        "hard",
        "data",
        "dangling",
        "absolute",
    }
    python = (folder / "bin" / "python3").stat()
    assert (python.st_mode & 0o7777, python.st_uid) == (0o755, os.geteuid())
    assert (folder / "data").stat().st_mode & 0o777 == 0o640
    assert (folder / "bin").stat().st_mode & 0o022 == 0
    assert (folder / "lib" / "deep" / "link").resolve() == folder / "bin" / "python3"
    assert (folder / "hard").stat().st_ino == python.st_ino


def climbing(tar: tarfile.TarFile) -> None:
    add(tar, "../evil")


def climbing_by_a_long_way(tar: tarfile.TarFile) -> None:
    add(tar, "a/../../evil")


def through_a_link(tar: tarfile.TarFile) -> None:
    add(tar, "up", tarfile.SYMTYPE, "..")
    add(tar, "up/evil")


def absolute_link(tar: tarfile.TarFile) -> None:
    add(tar, "link", tarfile.SYMTYPE, "/etc")


def link_to_outside(tar: tarfile.TarFile) -> None:
    add(tar, "a/link", tarfile.SYMTYPE, "../../evil")


def hard_link_to_outside(tar: tarfile.TarFile) -> None:
    add(tar, "hard", tarfile.LNKTYPE, "../evil")


def two_links(tar: tarfile.TarFile) -> None:
    """Each is inside where it lies; the hard link would move the relative one up."""
    add(tar, "a", tarfile.DIRTYPE)
    add(tar, "a/link", tarfile.SYMTYPE, "../evil")
    add(tar, "hard", tarfile.LNKTYPE, "a/link")
    add(tar, "hard")


def long_links(tar: tarfile.TarFile) -> None:
    """Each link leads further down by a long way and back, until the system no longer follows."""
    name = "d" * 247
    path = ""
    for step in "abcdefghijklmnop":
        add(tar, os.path.join(path, name), tarfile.DIRTYPE, mode=0o755)
        add(tar, os.path.join(path, step), tarfile.SYMTYPE, name)
        path = os.path.join(path, step)
    linked = os.path.join("a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p", "l" * 254)
    add(tar, linked, tarfile.SYMTYPE, "../" * 16)
    add(tar, "escape", tarfile.SYMTYPE, linked + "/../evil")
    add(tar, "escape")


def device(tar: tarfile.TarFile) -> None:
    add(tar, "null", tarfile.CHRTYPE)


def pipe(tar: tarfile.TarFile) -> None:
    add(tar, "pipe", tarfile.FIFOTYPE)


@pytest.mark.parametrize(
    "members",
    [
        climbing,
        climbing_by_a_long_way,
        through_a_link,
        absolute_link,
        link_to_outside,
        hard_link_to_outside,
        two_links,
        long_links,
        device,
        pipe,
    ],
)
def test_hostile_archives_are_refused(tmp_path: Path, folder: Path, members: Members) -> None:
    (folder.parent / "evil").write_text("untouched")
    with pytest.raises(tarfile.TarError):
        unpack_tar(packed(tmp_path, members), folder)
    assert [path.name for path in folder.parent.iterdir() if path != folder] == ["evil"]
    assert (folder.parent / "evil").read_text() == "untouched"
    assert all(path.is_file() or path.is_dir() or path.is_symlink() for path in folder.rglob("*"))


def test_what_is_no_archive_or_ends_early(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "none").write_text("no tar")
    with pytest.raises(tarfile.TarError):
        unpack_tar(tmp_path / "none", folder)
    archive = packed(tmp_path, lambda tar: tar.add(__file__, "file"))
    archive.write_bytes(archive.read_bytes()[:500])
    with pytest.raises((tarfile.TarError, EOFError, OSError)):
        unpack_tar(archive, folder)
