"""The folder that `weir init` makes: its files, and how they get there.

A server of the repository never finds half a model: the files are prepared in a hidden folder, which is then renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from weir.errors import StartError


class Sample(NamedTuple):
    """A sample request: the name of its file, its body, and the length of its JSON if binary tensors follow it."""

    file: str
    body: bytes
    json_length: int | None


class ModelFolder(NamedTuple):
    """What a model's folder will contain. `copies` are the sources of files by their paths in the folder."""

    name: str
    config: str
    sample: Sample | None
    copies: Mapping[str, Path]

    @property
    def texts(self) -> dict[str, bytes]:
        """The files that are written, by their paths in the folder."""
        written = {"config.pbtxt": self.config.encode()}
        return written if self.sample is None else {**written, self.sample.file: self.sample.body}


def write_folder(folder: ModelFolder, repository: Path, *, links: bool, replaces: bool) -> Path:
    """Makes the folder in `repository`, which is made too, and returns its path.

    With `links` copies are hard links. With `replaces` a folder of that name may exist: the files of the new one replace
    those with the same names, and others stay. Raises StartError.
    """
    target = repository / folder.name
    if target.exists() and not replaces:
        raise StartError(f"{target} exists already: choose another --name, or replace its files with --force")
    staging = repository / f".{folder.name}.{os.getpid()}"
    try:
        staging.mkdir(parents=True)
        _fill(staging, folder, links)
        if target.exists():
            for path in [*folder.copies, *folder.texts]:
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (staging / path).replace(target / path)
        else:
            staging.rename(target)
    except OSError as error:
        raise StartError(f"{target} can't be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _fill(staging: Path, folder: ModelFolder, links: bool) -> None:
    for path, source in folder.copies.items():
        (staging / path).parent.mkdir(parents=True, exist_ok=True)
        place: Callable[[Path, Path], object] = os.link if links else shutil.copyfile
        try:
            place(source.resolve(), staging / path)
        except OSError as error:
            what = "linked: without --link it is copied" if links else "copied"
            raise StartError(f"{source} can't be {what} ({error.strerror or error})") from error
    for path, content in folder.texts.items():
        (staging / path).write_bytes(content)
