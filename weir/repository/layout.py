"""`ModelRepository`: the models and versions in repository folders, and `Fingerprint`, by which changes of a folder are
detected.

Layout: `<repository>/<model>/[config.pbtxt] [configs/<name>.pbtxt] <version>/<artifact>`. Reading a repository changes
nothing and opens no file: the result is a snapshot of the folders, and `weir.repository.loading` reads the configurations.

A folder that cannot be read affects its model alone, and a repository that cannot be read affects its models alone.

As in Triton, modification times reveal changes. Names and sizes count too, so that a file that is added, removed, or
replaced by an older one is a change. Contents are not read.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weir.repository.paths import check_model_name, is_hidden, parse_version, path_inside
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid, unavailable
from weir.schemas.core.names import model_identity, plain_name

CONFIG_FILE = "config.pbtxt"

DUPLICATE = "model appears in two or more repositories"
"""The problem of a name that is in several repositories, without namespacing: none of the models is served.
The text is Triton's."""

_POLL_FAILED = "failed to load '{}', failed to poll from model repository"

_SILENT_FOLDERS = frozenset({"configs", "initial_state", "warmup"})


class NotInRepository(WeirError):
    """INTERNAL, as in Triton: no repository has a model of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(ErrorCode.INTERNAL, _POLL_FAILED.format(name))


def poll_failure(name: str, reason: str) -> WeirError:
    """The response to a load of a model whose folder or configuration can't be read: Triton's, and the `reason`, which
    Triton only logs.
    """
    return internal(f"{_POLL_FAILED.format(name)}: {reason}")


@dataclass(frozen=True, slots=True)
class FoundModel:
    r"""A model's folder at the time of a snapshot.

    `config_file` is relative to `path`, "" when there is none. `versions` ascend. `ignored` names folders that are
    neither versions nor have a meaning of their own. `problem` is why the model cannot be served, "" without a known
    problem. With namespacing, `namespace` is its repository, and `is_ambiguous` models share their name with others. The
    configuration of an `is_registered` model may have another name.
    Bytes of a folder's name that are not UTF-8 are written as `\xff`.
    """

    name: str
    path: Path
    config_file: str = ""
    versions: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    problem: str = ""
    namespace: str = ""
    is_ambiguous: bool = False
    is_registered: bool = False

    @property
    def identity(self) -> str:
        """The model's identity among the roles (`weir.schemas.core.names.model_identity`)."""
        return model_identity(self.name, self.namespace) if self.is_ambiguous else self.name

    def version_dir(self, version: int) -> Path:
        """The folder of `version`, inside the model's folder. Raises ConfigProblem for a link that leads out of it."""
        return path_inside(self.path, str(version))

    def artifact(self, version: int, filename: str) -> Path:
        """The path of `filename` in the folder of `version`, inside the model's folder. Raises ConfigProblem."""
        return path_inside(self.path, f"{version}/{filename}", "default_model_filename")


@dataclass(frozen=True, slots=True)
class RepositorySnapshot:
    """What all repositories hold: `models` by identity in order of names, and `unreadable` repositories with the reason."""

    models: dict[str, FoundModel] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)


class ModelRepository:
    """One or more repository folders, read as one repository.

    `config_name` chooses `configs/<config_name>.pbtxt` for the models that have it (Triton's `--model-config-name`). With
    `namespacing`, models of different folders may have the same name, and each has an identity of its own then.
    """

    def __init__(self, paths: Sequence[Path], config_name: str | None = None, namespacing: bool = False) -> None:
        if config_name:
            check_model_name(config_name)
        self.paths = list(dict.fromkeys(paths)) if namespacing else list(paths)
        self.config_name = config_name
        self.namespacing = namespacing

    def snapshot(self) -> RepositorySnapshot:
        """Every model folder, with the `problem` of those that cannot be served. Files and hidden folders are ignored."""
        places: dict[str, list[Path]] = {}
        unreadable: dict[Path, str] = {}
        for path in self.paths:
            try:
                folders = _model_folders(path)
            except OSError as error:
                unreadable[path] = f"failed to read model repository '{path.name}': {_why(error)}"
                continue
            for folder in folders:
                places.setdefault(_shown(folder.name), []).append(folder)
        found = (model for name in sorted(places) for model in self._read_all(name, places[name]))
        return RepositorySnapshot({model.identity: model for model in found}, unreadable)

    def scan(self) -> dict[str, FoundModel]:
        """The models of `snapshot`. Raises WeirError(UNAVAILABLE) when a repository cannot be read."""
        snapshot = self.snapshot()
        for problem in snapshot.unreadable.values():
            raise unavailable(problem)
        return snapshot.models

    def find(self, identity: str) -> FoundModel:
        """The model of this identity. Raises INVALID_ARG for an invalid name, INTERNAL (as Triton) for an unknown model."""
        found = next((model for model in self.find_all(plain_name(identity)) if model.identity == identity), None)
        if found is None:
            raise NotInRepository(identity)
        return found

    def find_all(self, name: str) -> list[FoundModel]:
        """The models of this name: one, or with namespacing one for each repository that has it. Raises as `find`."""
        check_model_name(name)
        found = self._read_all(name, self._folders(name))
        if not found:
            raise NotInRepository(name)
        return found

    def has(self, identity: str) -> bool:
        """Whether there is a model of this identity."""
        try:
            self.find(identity)
        except WeirError:
            return False
        return True

    def identities(self, names: Iterable[str]) -> list[str]:
        """The identities of all models with the names of these models; a model in no repository keeps its name."""
        plain = dict.fromkeys(map(plain_name, names))
        if not self.namespacing:
            return list(plain)
        places = {name: self._folders(name) for name in plain}
        return [
            model_identity(name, str(folder.parent)) if len(folders) > 1 else name
            for name, folders in places.items()
            for folder in folders or [Path(name)]
        ]

    def model_in(self, name: str, folder: Path, is_registered: bool = False) -> FoundModel:
        """The model `name` in `folder`, which replaces the one in the repository."""
        return replace(self._read(name, folder), is_registered=is_registered)

    def _folders(self, name: str) -> list[Path]:
        """The folders of the models of this name."""
        return [] if is_hidden(name) else [path / name for path in self.paths if _is_model_folder(path / name)]

    def _read_all(self, name: str, folders: list[Path]) -> list[FoundModel]:
        """The models of this name in `folders`, without folders that were removed since they were listed."""
        if len(folders) > 1 and not self.namespacing:
            return [FoundModel(name, folders[0], problem=DUPLICATE)]
        is_ambiguous = len(folders) > 1
        found = [self._read(name, folder) for folder in folders if _is_model_folder(folder)]
        if not self.namespacing:
            return found
        return [replace(model, namespace=str(model.path.parent), is_ambiguous=is_ambiguous) for model in found]

    def _read(self, name: str, folder: Path) -> FoundModel:
        try:
            check_model_name(name)
        except WeirError as error:
            return FoundModel(name, folder, problem=error.message)
        try:
            versions, ignored = _versions(folder)
        except OSError as error:
            return FoundModel(name, folder, problem=f"failed to read the folder of model '{name}': {_why(error)}")
        try:
            return FoundModel(name, folder, self._config_file(folder), versions, ignored)
        except OSError as error:
            problem = f"failed to read the configuration of model '{name}': {_why(error)}"
            return FoundModel(name, folder, "", versions, ignored, problem)

    def _config_file(self, folder: Path) -> str:
        """The configuration file to read. Raises OSError for one that exists and is not a readable file."""
        candidates = [f"configs/{self.config_name}.pbtxt"] if self.config_name else []
        for file in [*candidates, CONFIG_FILE]:
            try:
                status = os.stat(folder / file)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, f"{file} is not a regular file")
            return file
        return ""


def _model_folders(repository: Path) -> list[Path]:
    """The folders of models in `repository`, readable or not. Raises OSError."""
    with os.scandir(repository) as entries:
        return [repository / entry.name for entry in entries if not is_hidden(entry.name) and _may_be_folder(entry)]


def _is_model_folder(folder: Path) -> bool:
    """Whether `folder` is a folder, or a link to one, or a link that cannot be followed."""
    try:
        return stat.S_ISDIR(os.stat(folder).st_mode)
    except FileNotFoundError:
        return folder.is_symlink()
    except NotADirectoryError:
        return False
    except OSError:
        return True


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder, or a link to one, or a link that cannot be followed."""
    try:
        if entry.is_dir():
            return True
        return entry.is_symlink() and not entry.is_file() and _is_model_folder(Path(entry.path))
    except OSError:
        return True


def _versions(folder: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The versions in a model's folder, and the names of its other folders. Raises OSError."""
    versions: list[int] = []
    ignored: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not _may_be_folder(entry):
                continue
            version = parse_version(entry.name)
            if version is not None:
                versions.append(version)
            elif entry.name not in _SILENT_FOLDERS:
                ignored.append(_shown(entry.name))
    return tuple(sorted(versions)), tuple(sorted(ignored))


def _shown(name: str) -> str:
    """The name of a file as text that can be sent and printed."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__


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


Files = tuple[tuple[str, int, int], ...]
"""(path in the folder, time of modification in ns, size in bytes) of each file, in order of paths."""

_IGNORED_FOLDERS = frozenset({"__pycache__"})

MAX_FILES = 100_000
"""Files of a version: a folder that is a link to all of a disk must not take minutes at each look."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The files of each version, and those that all versions share, of the folder at `path`."""

    path: Path
    shared: Files
    versions: dict[int, Files]

    def check_count(self, model: str) -> None:
        """Raises WeirError (INVALID_ARG) for a version of more than `MAX_FILES` files, of which not all are in here."""
        for number, files in self.versions.items():
            if len(files) > MAX_FILES:
                raise invalid(f"version {number} of model '{model}' has more than {MAX_FILES} files")
        if len(self.shared) > MAX_FILES:
            raise invalid(f"model '{model}' has more than {MAX_FILES} files beside its versions")


def folder_fingerprint(found: FoundModel) -> Fingerprint:
    """The fingerprint of the model's folder now, without files that are removed meanwhile."""
    versions = {number: _bounded(_files(found.path / str(number), "")) for number in found.versions}
    folders = {str(number) for number in found.versions}
    return Fingerprint(found.path, _bounded(_files(found.path, "", folders)), versions)


def _bounded(files: Iterator[tuple[str, int, int]]) -> Files:
    return tuple(itertools.islice(files, MAX_FILES + 1))


def model_fingerprint(found: FoundModel) -> tuple[Fingerprint, str, str, tuple[bool, ...]]:
    """Everything whose change may change the result of loading the model: its files, its problem and permissions.

    The permissions are those of the configuration and the versions: granting them repairs the model.
    """
    needed = [found.config_file, *map(str, found.versions)]
    readable = tuple(os.access(found.path / name, os.R_OK) for name in needed)
    return folder_fingerprint(found), found.problem, found.config_file, readable


def _files(
    folder: Path, prefix: str, without: set[str] | frozenset[str] = frozenset()
) -> Iterator[tuple[str, int, int]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name in without or entry.name in _IGNORED_FOLDERS or entry.name.startswith("."):
            continue
        try:
            if entry.is_dir(follow_symlinks=not prefix):  # links deeper down could form cycles
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                status = entry.stat()
                yield f"{prefix}{entry.name}", status.st_mtime_ns, status.st_size
        except OSError:
            continue
