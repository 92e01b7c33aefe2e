"""`ModelRepository`: the folders on disk, and which models and versions are in them.

Layout: `<repository>/<model>/[config.pbtxt] [configs/<name>.pbtxt] <version>/<artifact>`. Looking changes nothing and
opens no file: what is found is a snapshot, and reading the configuration is the work of `repository.loading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repository.paths import check_model_name, parse_version, path_inside
from schemas.errors import WeirError, internal, invalid, unavailable
from schemas.model_config import ModelConfig

CONFIG_FILE = "config.pbtxt"

DUPLICATE = "model appears in two or more repositories"
"""The problem of a name that is in several repositories: none of the models is served, in Triton's words."""

_SILENT_FOLDERS = frozenset({"configs", "initial_state", "warmup"})


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder as it was when looked at.

    `config_file` is relative to `path`, "" when there is none. `versions` ascend. `ignored` names folders that are
    neither versions nor known by name. `problem` says why the model can't be served, "" when nothing is known to be
    wrong.
    """

    name: str
    path: Path
    config_file: str = ""
    versions: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    problem: str = ""

    def version_dir(self, version: int) -> Path:
        """The folder of `version`, inside the model's folder. Raises ConfigProblem for a link that leads out of it."""
        return path_inside(self.path, str(version))

    def artifact(self, version: int, filename: str) -> Path:
        """The path of `filename` in the folder of `version`, inside the model's folder. Raises ConfigProblem."""
        return path_inside(self.path, f"{version}/{filename}", "default_model_filename")


class ModelRepository:
    """One or more repository folders, looked at together.

    `config_name` chooses `configs/<config_name>.pbtxt` for the models that have it (Triton's `--model-config-name`).
    """

    def __init__(self, paths: Sequence[Path], config_name: str | None = None) -> None:
        if config_name:
            check_model_name(config_name)
        self.paths = list(paths)
        self.config_name = config_name

    def scan(self) -> dict[str, FoundModel]:
        """Every model folder by name, in order of names; those that can't be served say so in `problem`.

        Files and hidden folders are passed over. Raises WeirError(UNAVAILABLE) when a repository can't be read.
        """
        places: dict[str, list[Path]] = {}
        for path in self.paths:
            for folder in _subfolders(path):
                places.setdefault(folder.name, []).append(folder)
        return {name: self._look(name, places[name]) for name in sorted(places)}

    def find(self, name: str) -> FoundModel:
        """The model `name`. Raises INVALID_ARG for a name that is none, INTERNAL (as Triton) when it is not there."""
        check_model_name(name)
        folders = [path / name for path in self.paths if (path / name).is_dir()]
        if not folders:
            raise internal(f"failed to load '{name}', failed to poll from model repository")
        return self._look(name, folders)

    def look_at(self, name: str, folder: Path) -> FoundModel:
        """The model `name` in `folder`, wherever that is: what stands in for the one in the repository."""
        return self._look(name, [folder])

    def _look(self, name: str, folders: list[Path]) -> FoundModel:
        folder = folders[0]
        if len(folders) > 1:
            return FoundModel(name, folder, problem=DUPLICATE)
        try:
            check_model_name(name)
        except WeirError as error:
            return FoundModel(name, folder, problem=error.message)
        versions, ignored = _versions(folder)
        return FoundModel(name, folder, self._config_file(folder), versions, ignored)

    def _config_file(self, folder: Path) -> str:
        candidates = [f"configs/{self.config_name}.pbtxt"] if self.config_name else []
        return next((file for file in [*candidates, CONFIG_FILE] if (folder / file).is_file()), "")


def _subfolders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise unavailable(f"failed to read model repository '{path.name}': {error.strerror}") from error


def _versions(folder: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    versions: list[int] = []
    ignored: list[str] = []
    for entry in _subfolders(folder):
        version = parse_version(entry.name)
        if version is not None:
            versions.append(version)
        elif entry.name not in _SILENT_FOLDERS:
            ignored.append(entry.name)
    return tuple(sorted(versions)), tuple(sorted(ignored))


def select_versions(config: ModelConfig, available: Sequence[int]) -> list[int]:
    """The versions to serve, ascending: those of `available` that the version policy admits.

    Without a policy, the latest one. Raises INVALID_ARG, in Triton's words, when none is left.
    """
    policy = config.version_policy
    ascending = sorted(available)
    if policy is not None and policy.all is not None:
        chosen = ascending
    elif policy is not None and policy.specific is not None:
        chosen = [version for version in ascending if version in policy.specific.versions]
    else:
        count = policy.latest.num_versions if policy is not None and policy.latest is not None else 1
        chosen = ascending[-max(count, 1) :]
    if not chosen:
        raise invalid(f"at least one version must be available under the version policy of model '{config.name}'")
    return chosen
