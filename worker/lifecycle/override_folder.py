"""`OverrideFolder`: the files of a load request, in a temporary folder that replaces the model's folder.

All paths must be relative and inside of the folder. It is removed when the model is unloaded. Folders of a worker that was
killed are removed by the next worker: a folder is locked as long as its worker runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from weir.repository.paths import check_model_name
from weir.runtime.folders.locked import LockedFolder
from weir.schemas.core.errors import WeirError, invalid, unavailable

PREFIX = "weir-model-"
"""The prefix of the folders' names."""


def check_override_path(path: str) -> None:
    """Raises INVALID_ARG, in Triton's words, unless `path` names a file inside the model's folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.endswith("/") or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise invalid(f"Invalid file parameter 'file:{path}' must stay within model directory.")


class OverrideFolder:
    """A folder with these files (content by path). Blocking. Raises WeirError if they can't be written."""

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
        """Removes the folder with its files. May be called again."""
        self._folder.remove()
