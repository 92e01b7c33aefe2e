"""Folders and files that belong to one user, on a machine where other users may write beside them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_MAX_LINKS = 40


def private_folder(path: Path, creates: bool = True) -> Path:
    """Return `path` with its links resolved; create it, and the folders above it that are missing, with mode 0700.

    In a folder where every user may write, as in /tmp, neither a link nor a folder of another user leads on. Raises OSError
    for these, for a folder that others may enter or that belongs to another user, and without `creates` for a missing one.
    """
    here, links = Path("/"), 0
    left = list(reversed(path.absolute().parts[1:]))
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent  # `here` has no links
            continue
        is_open = here.stat().st_mode & stat.S_IWOTH
        here, above = here / name, here
        if creates:
            with contextlib.suppress(FileExistsError):
                _create_if_missing(here)
        status = here.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        if is_open and (is_link or status.st_uid not in (os.geteuid(), 0)):
            what = "is a link" if is_link else "belongs to another user"
            raise OSError(errno.EPERM, f"{here} {what}, in a folder where every user may write")
        if is_link:
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, f"{path} leads through more than {_MAX_LINKS} links")
            target = Path(os.readlink(here))
            here = Path("/") if target.is_absolute() else above
            left += reversed([part for part in target.parts if part != "/"])
    status = here.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, f"{here} is not a folder that only this user may enter")
    return here


def _create_if_missing(folder: Path) -> None:
    try:
        folder.lstat()
    except FileNotFoundError:
        folder.mkdir(mode=0o700)


def write_private(path: Path, text: str) -> None:
    """Replace a file, at once for its readers, by one of mode 0600 with this text. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)
