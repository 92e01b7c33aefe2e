"""Where `weir serve` keeps its data without `--data-dir`: `default_data_dir`, one folder for each project and port.

Two projects that are served on the same port, one after the other, must not find each other's queued requests, jobs and
dead letters. Earlier releases had one folder for each port. Where that exists it is used still, so that what was queued
before an upgrade is found after it.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

PROJECT_MARKS = (".git", ".hg", "pyproject.toml")
"""What the folder of a project holds, one of these at least. A file `.git` is that of a worktree."""

_MAX_NAME = 40
_FOREIGN = re.compile(r"[^A-Za-z0-9_.]+")


class DataFolder(NamedTuple):
    """A default data folder. `is_of_port`: it is that of an earlier release, for whatever is served on the port."""

    path: Path
    is_of_port: bool = False


def data_home() -> Path:
    """The default parent of the data folders of `weir serve`. Raises RuntimeError where this user has no home."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "weir"


def default_data_dir(port: int) -> DataFolder:
    """The data folder of a server that is started in the current folder and listens on `port`."""
    return choose_data_dir(data_home(), port, project_folder())


def choose_data_dir(home: Path, port: int, project: Path | None) -> DataFolder:
    """The folder in `home` for `project` and `port`: an existing one of both, else an existing one of the port, else a new
    one of both. Without a project it is that of the port.
    """
    of_port = home / str(port)
    if project is None:
        return DataFolder(of_port, True)
    name = _FOREIGN.sub("-", project.name).strip("-.")[:_MAX_NAME] or "project"
    # Projects of the same name in different places differ.
    place = hashlib.blake2s(os.fsencode(project), digest_size=4).hexdigest()
    own = home / f"{name}-{place}-{port}"
    return DataFolder(of_port, True) if os.path.isdir(of_port) and not os.path.isdir(own) else DataFolder(own)


def project_folder() -> Path | None:
    """The nearest folder of a project (`PROJECT_MARKS`) from the current one upwards, else the current folder.

    None if the current folder was deleted.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return None
    return next((folder for folder in (here, *here.parents) if _is_project(folder)), here)


def _is_project(folder: Path) -> bool:
    return any(os.path.lexists(folder / mark) for mark in PROJECT_MARKS)
