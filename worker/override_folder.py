"""`OverrideFolder`: the files that came with a load request, in a folder of their own that stands in for the model's.

They never leave it: each path is relative and stays inside. The folder is removed when the model is unloaded, and what
a worker that was killed has left behind is removed by the next one (folders in use are locked, however their worker ends).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from repository.paths import check_model_name
from schemas.errors import WeirError, invalid, unavailable
from worker.locked_folder import LockedFolder

PREFIX = "weir-model-"
"""What the names of these folders begin with."""


def check_override_path(path: str) -> None:
    """Raises INVALID_ARG, in Triton's words, unless `path` names a file inside the model's folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.endswith("/") or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise invalid(f"Invalid file parameter 'file:{path}' must stay within model directory.")


class OverrideFolder:
    """A folder with these files: content by path. Blocking. Raises WeirError when they can't be written."""

    def __init__(self, model: str, files: Mapping[str, bytes]) -> None:
        check_model_name(model)
        for path in files:
            check_override_path(path)
        self._folder = LockedFolder(PREFIX)
        self.path = self._folder.path / model
        try:
            self.path.mkdir()
            for name, content in files.items():
                file = self.path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        except OSError as error:
            self.remove()
            raise unavailable(f"the files of model '{model}' could not be written: {error.strerror}") from error
        except WeirError:
            self.remove()
            raise

    def remove(self) -> None:
        """Gives the folder up, with everything in it. May be called again."""
        self._folder.remove()
