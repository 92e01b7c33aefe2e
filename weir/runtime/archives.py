"""`unpack_tar`: unpacks a tar archive from somewhere else, of which no member gets outside of its folder.

`tarfile` has a filter for that from Python 3.11.4 on, with gaps in early releases. So each member is checked here, on
Debian 12's Python 3.11.2 as on any other, and by that filter besides where there is one.
Source: PEP 706; CVE-2025-4517 (links whose target is longer than a path may be), CVE-2025-4330 (links to links).
"""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path
from typing import Any

_MAX_PATH = 4096


def unpack_tar(archive: Path, folder: Path) -> None:
    """Unpacks regular files, folders and links. They belong to this process's user and get no special permissions.

    Raises tarfile.TarError for a file that is no archive, or that has a device, or a member or a link that leads out of
    `folder`; OSError or EOFError for one that can't be read to its end. The members before have been unpacked then.
    """
    filtered: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as tar:
        # A generator: each member is checked when those before it, which may be links, are in the folder.
        tar.extractall(folder, (_checked(member, folder) for member in tar), **filtered)  # noqa: S202


def _checked(member: tarfile.TarInfo, folder: Path) -> tarfile.TarInfo:
    """The member as it may be unpacked into `folder` now. Raises tarfile.TarError."""
    member.name = member.name.lstrip("/")
    _check_inside(member, member.name, folder)
    if member.issym():
        _check_inside(member, os.path.join(os.path.dirname(member.name), member.linkname), folder)
    elif member.islnk():
        target = _check_inside(member, member.linkname, folder)
        # `tarfile` would unpack the target again in the link's place, where a relative link leads elsewhere.
        if os.path.islink(folder / member.linkname) or not os.path.isfile(target):
            raise tarfile.ExtractError(f"{member.name!r} is a link to {member.linkname!r}, which is no file")
    elif not (member.isreg() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name!r} is a special file")
    is_executable = member.isdir() or bool(member.mode & stat.S_IXUSR)
    member.mode = stat.S_IRUSR | stat.S_IWUSR | member.mode & (0o755 if is_executable else 0o644)
    if member.isdir():
        member.mode |= stat.S_IXUSR
    # A privileged process would give files to the user that the archive names.
    member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
    return member


def _check_inside(member: tarfile.TarInfo, path: str, folder: Path) -> str:
    root = os.path.realpath(folder)
    target = os.path.realpath(os.path.join(root, path))
    # Of a path that is too long for the system the rest is taken as it is, whatever links it has.
    if os.path.commonpath([root, target]) != root or len(target) >= _MAX_PATH:
        raise tarfile.ExtractError(f"{member.name!r} leads to {target[:200]!r}, which is outside the destination")
    return target
