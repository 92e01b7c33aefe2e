"""`Uploads`: the items of jobs whose clients sent them along, and their outputs, in a folder below a batch root.

They go when the job is forgotten. What belongs to no job, because its gateway was killed while it came, goes after a day.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path

FOLDER = "weir-uploads"
_INPUT, _OUTPUT = "input.jsonl", "output"
_ORPHANS_AGE_S = 86400.0
_PIECE_BYTES = 256 << 10


class Uploads:
    """See the module. All methods block on the file system, and raise OSError."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def store(self, id: str, body: bytes) -> tuple[str, str]:
        """Puts the items of job `id` on disk; (where they lie, where its output goes)."""
        folder = self._folder / id
        folder.mkdir(parents=True)
        with (folder / _INPUT).open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        return str(folder / _INPUT), str(folder / _OUTPUT)

    def remove(self, id: str) -> None:
        """Removes what there is of job `id`, which may be nothing."""
        shutil.rmtree(self._folder / id, ignore_errors=True)

    def sweep(self, known: Collection[str]) -> None:
        """Removes what has belonged to none of these jobs for long."""
        try:
            entries = list(os.scandir(self._folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name not in known and entry.stat(follow_symlinks=False).st_mtime < time.time() - _ORPHANS_AGE_S:
                self.remove(entry.name)


def json_lines(output: Path) -> Iterator[bytes]:
    """The content of the shards of JSON Lines in an output folder, in order, piece by piece."""
    for shard in sorted(output.glob("part-*.jsonl")):
        with shard.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
