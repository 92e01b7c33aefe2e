"""`Fingerprint`: what a model's folder looked like, to see whether it has changed since.

As in Triton, times of modification tell; names and sizes are looked at as well, so that a file that comes or goes, or is
replaced by an older one, is a change too. Contents are not read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repository.layout import FoundModel
from schemas.model_config import ModelConfig

Files = tuple[tuple[str, int, int], ...]
"""(path in the folder, time of modification in ns, size in bytes) of each file, in order of paths."""

_NOT_THE_MODEL_S = frozenset({"__pycache__"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The files of each version, and those that all versions share, of the folder at `path`."""

    path: Path
    shared: Files
    versions: dict[int, Files]

    def load_mark(self, version: int, config: ModelConfig) -> str:
        """A text for this version of these files under this configuration, wherever they lie; other ones have another."""
        facts = (self.versions.get(version), self.shared, config.model_dump_json())
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def fingerprint(found: FoundModel) -> Fingerprint:
    """The fingerprint of the model's folder as it is now; files that vanish meanwhile are left out."""
    versions = {number: tuple(_files(found.path / str(number), "")) for number in found.versions}
    folders = {str(number) for number in found.versions}
    return Fingerprint(found.path, tuple(_files(found.path, "", folders)), versions)


def appearance(found: FoundModel) -> tuple[Fingerprint, str, str, tuple[bool, ...]]:
    """What tells whether the model is to be looked at again: more than its files, for it may have a problem.

    Permissions count too, as far as loading ever begins with them: to grant them is to repair the model.
    """
    needed = [found.config_file, *map(str, found.versions)]
    readable = tuple(os.access(found.path / name, os.R_OK) for name in needed)
    return fingerprint(found), found.problem, found.config_file, readable


def _files(
    folder: Path, prefix: str, without: set[str] | frozenset[str] = frozenset()
) -> Iterator[tuple[str, int, int]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name in without or entry.name in _NOT_THE_MODEL_S or entry.name.startswith("."):
            continue
        try:
            if entry.is_dir(follow_symlinks=not prefix):  # links deeper down could make circles
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                status = entry.stat()
                yield f"{prefix}{entry.name}", status.st_mtime_ns, status.st_size
        except OSError:
            continue
