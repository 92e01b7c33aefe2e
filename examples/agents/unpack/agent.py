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
            for member in archive:
                path = (folder / member.name).resolve()
                if not path.is_relative_to(folder.resolve()) or not (member.isfile() or member.isdir()):
                    raise ValueError(f"the archive has {member.name}, which is not a file inside of it")
                content = archive.extractfile(member)
                if content is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())
        print(f"unpacked {model.name} into {folder}")
        return folder

    def unload(self, model: Any) -> None:
        print(f"{model.name} was unloaded")
