"""Messages about loading and unloading: the desired state of models, pushed models, and the queries to workers.

Bucket `models` has one `DesiredModel` for each model that the repository API has ever loaded or unloaded. The bucket
of a repository that lies in NATS has one `PushedModel` for each of its models.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta

from weir.schemas.wire.codec import MalformedMessage, Message, NonNegative, Record

MAX_REVISION = 1 << 62

MAX_FILES = 4096
"""Files in one load request."""

MAX_CONFIG_LENGTH = 1 << 20
"""Characters of the configuration in a load request."""

MAX_PUSHED_FILES = 10_000
"""Files of one pushed model."""

MAX_PATH_LENGTH = 1024
"""Characters of the path of a pushed file."""


class RegisteredFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's folder outside of the repositories, at the same path on every worker.

    A client registered it with the repository that holds it, under a name of its own, `alias` (both "": only for another
    model). The folder's name and the name in its configuration do not matter.
    """

    folder: Annotated[str, Meta(max_length=4096)]
    repository: Annotated[str, Meta(max_length=4096)] = ""
    alias: Annotated[str, Meta(max_length=4096)] = ""


class WantedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model to be loaded, or (`load` False) to be unloaded.

    `config`, in protobuf's JSON, replaces the configuration on disk. `files` replace the model's folder: the name of an
    object in the object store by the path in the folder. `registered` replaces it by another folder (`source`).

    A load that replaces nothing leaves a model as it is whose files have not changed, with the `config` of an earlier load
    if there is one, unless it `drops_override`. Older releases have neither this field nor `registered`: they are sent only
    where they are set.
    """

    load: bool
    config: str | None = None
    files: Annotated[dict[str, str], Meta(max_length=MAX_FILES)] = {}
    registered: RegisteredFolder | msgspec.UnsetType = msgspec.UNSET
    drops_override: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def source(self) -> RegisteredFolder | None:
        """The folder outside of the repositories that has the model, None for a model of a repository."""
        return self.registered or None

    @property
    def is_override(self) -> bool:
        """Whether anything replaces what the repositories have."""
        return self.config is not None or bool(self.files) or self.source is not None

    @property
    def keeps_unchanged(self) -> bool:
        """Whether it is a load that leaves a model as it is whose files have not changed."""
        return self.load and not self.is_override and self.drops_override is not True


class DesiredModel(Record, frozen=True, forbid_unknown_fields=True):
    """The desired state of one model: `wanted` now, and until that has worked, the `fallback` that it was before.

    A reload that fails leaves the old version serving, also after a restart of the worker: hence the fallback. `revision`
    grows with each operation on the model. `explicit` models were named by a client, others are loaded for an ensemble.
    """

    name: str
    revision: Annotated[int, Meta(gt=0, lt=MAX_REVISION)]
    wanted: WantedModel
    fallback: WantedModel | None = None
    explicit: bool = True

    def objects(self) -> set[str]:
        """Names of the objects that the entry refers to."""
        return {name for wanted in (self.wanted, self.fallback) if wanted is not None for name in wanted.files.values()}


class PushedFile(NamedTuple):
    """One file: its path in the model's folder, with `/`, its size, and the SHA-256 of its content in hexadecimal."""

    path: str
    size_bytes: NonNegative
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class PushedModel(Message, frozen=True):
    """The folder of a model that was pushed into a repository that lies in NATS.

    `folders` are those without files, relative to it: a version of an ensemble is an empty folder.
    """

    name: str
    files: Annotated[tuple[PushedFile, ...], Meta(max_length=MAX_PUSHED_FILES)]
    folders: Annotated[tuple[str, ...], Meta(max_length=MAX_PUSHED_FILES)] = ()

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """The model in `data`. Raises MalformedMessage, also for a path that leads out of the model's folder."""
        model = super().unpack(data)
        if not all(map(is_inside, (*(file.path for file in model.files), *model.folders))):
            raise MalformedMessage("not a PushedModel: a path leads out of the model's folder")
        if len({file.path for file in model.files}) != len(model.files):
            raise MalformedMessage("not a PushedModel: two files have the same path")
        return model


def is_inside(path: str) -> bool:
    """Whether `path` names a file inside the folder that it is relative to, in a form that every file system accepts."""
    parts = path.split("/")
    return (
        0 < len(path) <= MAX_PATH_LENGTH
        and path.isprintable()
        and "\\" not in path
        and all(part not in ("", ".", "..") for part in parts)
    )


class RepositoryView(Message, frozen=True):
    """The reply of `worker` to a repository query: why each model cannot be served, by name ("": it can be served)."""

    worker: str
    problems: dict[str, str]


class DrainMessage(Message, frozen=True):
    """A worker's request to unload these versions of `model`, or the reply: the worker may unload these versions.

    The worker repeats the request until the reply names all versions. A reply is about the requests in one `partition` of
    the model. The scheduler keeps no state between two requests but the versions it has released, so either may restart.
    """

    worker: str
    model: str
    versions: list[int]
    partition: int = 0

    @classmethod
    def of(cls, worker: str, model: str, versions: Collection[int], partition: int = 0) -> DrainMessage:
        """The message, with the versions in order."""
        return cls(worker, model, sorted(versions), partition)


class ReadinessQuery(Message, frozen=True):
    """The query of whether a version of a model (by its identity) that implements its own readiness check is ready."""

    model: str
    version: int


class ReadinessReply(Message, frozen=True):
    """The reply to a `ReadinessQuery`."""

    is_ready: bool
