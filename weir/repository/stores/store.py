"""`ModelStore`: a model repository that is not local, as a mirror of it reads it; and what it reads: `StoredModel`.

A model's files are all objects below its folder. A change is detected by size and *tag* (the store's ETag, or the time of
the last modification where a store has none): nothing is downloaded to find out what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from weir.repository.paths import parse_version
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.model_control import MAX_PUSHED_FILES, is_inside

FOLDER_MARK = ".folder"
"""The file that stands for an empty folder: a version of an ensemble has no files, and object stores have no folders."""


RANGE_BYTES = 4 << 20
"""Bytes that one request reads of a file; a range begins at a multiple of them."""


class StoreError(WeirError):
    """A store could not be read. `is_transient`: the same request may succeed later without a change of settings.

    `has_changed`: an object was replaced or removed after it was listed. `bad_object`: why an object can't be listed, and
    with it nothing of its listing: its name has an empty part, `.`, `..` or a control character.
    """

    def __init__(
        self, message: str, is_transient: bool = False, has_changed: bool = False, bad_object: str = ""
    ) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)
        self.is_transient = is_transient
        self.has_changed = has_changed
        self.bad_object = bad_object


class StoredFile(NamedTuple):
    """One file: its path in the model's folder, its size, and its tag, which changes with its content."""

    path: str
    size_bytes: int
    tag: str


class StoredModel(msgspec.Struct, frozen=True):
    """A model's folder in a store, as it was listed. `problem` says why it can't be fetched, "" if it can."""

    name: str
    files: tuple[StoredFile, ...]
    problem: str = ""

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that have files, ascending."""
        folders = {file.path.partition("/")[0] for file in self.files if "/" in file.path}
        return tuple(sorted(version for version in map(parse_version, folders) if version is not None))


class ModelStore(Protocol):
    """A repository in an object store (`weir.repository.stores.cloud.CloudStore`) or in NATS (`PushedStore` of workers).

    All methods raise StoreError, whose message names the repository.
    """

    @property
    def name(self) -> str:
        """The address of the repository, without credentials."""

    async def models(self) -> Mapping[str, StoredModel]:
        """All models by name, from one listing."""

    async def find(self, name: str) -> StoredModel | None:
        """The model, from a listing of its folder; None if it has no files."""

    async def read(self, model: str, file: StoredFile, start: int, end: int) -> memoryview:
        """The bytes of a file from `start` to before `end`."""

    async def subscribe(self, on_change: Callable[[str], None]) -> bool:
        """Calls `on_change(name)` after a model has changed ("": any may have). Returns False if the store can't tell."""


def group_models(objects: Iterable[tuple[str, int, str]], skipped: int = 0) -> dict[str, StoredModel]:
    """The models that objects (path, size, tag) belong to, without the first `skipped` characters of each path.

    Files beside models are ignored.
    """
    by_model: dict[str, list[StoredFile]] = {}
    for path, size_bytes, tag in objects:
        model, _, rest = path[skipped:].partition("/")
        if rest and not model.startswith("."):
            by_model.setdefault(model, []).append(StoredFile(rest, size_bytes, tag))
    return {name: describe_model(name, files) for name, files in sorted(by_model.items())}


def describe_model(name: str, files: Iterable[StoredFile]) -> StoredModel:
    """The model of these files. An empty object where others have a folder marks the folder, and is no file."""
    listed = sorted(files)
    folders = {folder for file in listed for folder in _folders(file.path)}
    kept: list[StoredFile] = []
    for file in listed:
        if file.size_bytes == 0 and file.path in folders:
            continue
        if file.size_bytes == 0 and parse_version(file.path) is not None:
            file = file._replace(path=f"{file.path}/{FOLDER_MARK}")
        kept.append(file)
    problem = ""
    invalid = next((file.path for file in kept if not is_inside(file.path) or file.path in folders), None)
    if invalid is not None:
        problem = f"model '{name}' has an object '{invalid!r}' that can't be a file of a model"
    elif len(kept) > MAX_PUSHED_FILES:
        problem = f"model '{name}' has {len(kept)} files, at most {MAX_PUSHED_FILES} are allowed"
    return StoredModel(name, tuple(kept), problem)


def _folders(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))
