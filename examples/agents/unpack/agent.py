"""A repository agent for models that are stored as an archive: `model.tar.gz` in place of the version folders."""

import shutil
import tarfile
from pathlib import Path
from typing import Any


class RepositoryAgent:
    def load(self, model: Any) -> Path:
        folder = Path(model.new_folder())
        shutil.copytree(model.path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.tar.gz"))
        with tarfile.open(Path(model.path) / model.parameters.get("archive", "model.tar.gz")) as archive:
            archive.extractall(folder, filter="data")
        print(f"unpacked {model.name} into {folder}")
        return folder

    def unload(self, model: Any) -> None:
        print(f"{model.name} was unloaded")
