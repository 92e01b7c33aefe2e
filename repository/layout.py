"""`ModelRepository`: the folders on disk, and which models and versions are in them.

Layout: `<repository>/<model>/[config.pbtxt] [configs/<name>.pbtxt] <version>/<artifact>`. Looking changes nothing and
opens no file: what is found is a snapshot, and reading the configuration is the work of `repository.loading`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repository.paths import check_model_name, parse_version, path_inside
from schemas.errors import WeirError, internal, invalid, unavailable
from schemas.model_config import ModelConfig
from schemas.model_identity import model_identity, plain_name

CONFIG_FILE = "config.pbtxt"

DUPLICATE = "model appears in two or more repositories"
"""The problem of a name that is in several repositories, without namespacing: none of the models is served, in Triton's
words."""

_SILENT_FOLDERS = frozenset({"configs", "initial_state", "warmup"})


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder as it was when looked at.

    `config_file` is relative to `path`, "" when there is none. `versions` ascend. `ignored` names folders that are
    neither versions nor known by name. `problem` says why the model can't be served, "" when nothing is known to be
    wrong. With namespacing, `namespace` is the repository it lies in; `is_ambiguous` tells that others have its name.
    """

    name: str
    path: Path
    config_file: str = ""
    versions: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    problem: str = ""
    namespace: str = ""
    is_ambiguous: bool = False

    @property
    def identity(self) -> str:
        """What it is known by among the roles (`schemas.model_identity`)."""
        return model_identity(self.name, self.namespace) if self.is_ambiguous else self.name

    def version_dir(self, version: int) -> Path:
        """The folder of `version`, inside the model's folder. Raises ConfigProblem for a link that leads out of it."""
        return path_inside(self.path, str(version))

    def artifact(self, version: int, filename: str) -> Path:
        """The path of `filename` in the folder of `version`, inside the model's folder. Raises ConfigProblem."""
        return path_inside(self.path, f"{version}/{filename}", "default_model_filename")


class ModelRepository:
    """One or more repository folders, looked at together.

    `config_name` chooses `configs/<config_name>.pbtxt` for the models that have it (Triton's `--model-config-name`). With
    `namespacing`, models of different folders may have the same name, and each has an identity of its own then.
    """

    def __init__(self, paths: Sequence[Path], config_name: str | None = None, namespacing: bool = False) -> None:
        if config_name:
            check_model_name(config_name)
        self.paths = list(dict.fromkeys(paths)) if namespacing else list(paths)
        self.config_name = config_name
        self.namespacing = namespacing

    def scan(self) -> dict[str, FoundModel]:
        """Every model folder by identity, in order of names; those that can't be served say so in `problem`.

        Files and hidden folders are passed over. Raises WeirError(UNAVAILABLE) when a repository can't be read.
        """
        places: dict[str, list[Path]] = {}
        for path in self.paths:
            for folder in _subfolders(path):
                places.setdefault(folder.name, []).append(folder)
        found = (model for name in sorted(places) for model in self._look_at_all(name, places[name]))
        return {model.identity: model for model in found}

    def find(self, identity: str) -> FoundModel:
        """The model of this identity. Raises INVALID_ARG for what can't be one, INTERNAL (as Triton) where it isn't."""
        found = next((model for model in self.find_all(plain_name(identity)) if model.identity == identity), None)
        if found is None:
            raise _not_found(identity)
        return found

    def find_all(self, name: str) -> list[FoundModel]:
        """The models called `name`: one, or with namespacing one for each repository that has it. Raises as `find`."""
        check_model_name(name)
        folders = [path / name for path in self.paths if (path / name).is_dir()]
        if not folders:
            raise _not_found(name)
        return self._look_at_all(name, folders)

    def has(self, identity: str) -> bool:
        """Whether there is a model of this identity."""
        try:
            self.find(identity)
        except WeirError:
            return False
        return True

    def with_namesakes(self, names: Iterable[str]) -> list[str]:
        """The identities of all models that are called as these are; what is in no repository stays as it is."""
        plain = dict.fromkeys(map(plain_name, names))
        if not self.namespacing:
            return list(plain)
        places = {name: [path / name for path in self.paths if (path / name).is_dir()] for name in plain}
        return [
            model_identity(name, str(folder.parent)) if len(folders) > 1 else name
            for name, folders in places.items()
            for folder in folders or [Path(name)]
        ]

    def look_at(self, name: str, folder: Path) -> FoundModel:
        """The model `name` in `folder`, wherever that is: what stands in for the one in the repository."""
        return self._look(name, folder)

    def _look_at_all(self, name: str, folders: list[Path]) -> list[FoundModel]:
        if not self.namespacing:
            if len(folders) > 1:
                return [FoundModel(name, folders[0], problem=DUPLICATE)]
            return [self._look(name, folders[0])]
        is_ambiguous = len(folders) > 1
        return [
            replace(self._look(name, folder), namespace=str(folder.parent), is_ambiguous=is_ambiguous)
            for folder in folders
        ]

    def _look(self, name: str, folder: Path) -> FoundModel:
        try:
            check_model_name(name)
        except WeirError as error:
            return FoundModel(name, folder, problem=error.message)
        versions, ignored = _versions(folder)
        return FoundModel(name, folder, self._config_file(folder), versions, ignored)

    def _config_file(self, folder: Path) -> str:
        candidates = [f"configs/{self.config_name}.pbtxt"] if self.config_name else []
        return next((file for file in [*candidates, CONFIG_FILE] if (folder / file).is_file()), "")


def _not_found(name: str) -> WeirError:
    return internal(f"failed to load '{name}', failed to poll from model repository")


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
