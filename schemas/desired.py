"""What the repository API has asked for: the values of bucket `models`, one for each model that was ever asked for.

An entry says what a model should be now (`wanted`) and, until that has worked, what it was before (`fallback`): a reload
that fails leaves the old version serving, and so it must after a restart of the worker as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage

MAX_REVISION = 1 << 62
MAX_FILES = 4096
"""Files that one load request may bring."""

MAX_CONFIG_LENGTH = 1 << 20
"""Characters of the configuration that a load request brings."""


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model to be loaded, or (`load` False) to be unloaded.

    `config` is the configuration that stands in for the one on disk, in protobuf's JSON; None for that on disk. `files`
    stand in for the model's folder: the name of an object in the object store by the path in the folder.
    """

    load: bool
    config: str | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def is_override(self) -> bool:
        """Whether something stands in for what is on disk."""
        return self.config is not None or bool(self.files)


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """One model's entry. `revision` grows with each operation on it; `explicit` tells that it was asked for by name."""

    name: str
    revision: int
    wanted: WantedModel
    fallback: WantedModel | None = None
    explicit: bool = True

    def objects(self) -> set[str]:
        """Names of the objects that the entry refers to."""
        return {name for wanted in (self.wanted, self.fallback) if wanted is not None for name in wanted.files.values()}


def pack_desired(entry: DesiredModel) -> bytes:
    """The entry as a value of the bucket."""
    return bytes(msgpack.packb([WIRE_VERSION, asdict(entry)]))


def unpack_desired(data: bytes) -> DesiredModel:
    """The entry in a value of the bucket. Raises MalformedMessage."""
    try:
        version, fields = msgpack.unpackb(data)
        if version != WIRE_VERSION:
            raise TypeError(f"wire version {version!r}")
        wanted, fallback = fields.pop("wanted"), fields.pop("fallback")
        entry = DesiredModel(wanted=_wanted(wanted), fallback=None if fallback is None else _wanted(fallback), **fields)
        if not (type(entry.name) is str and type(entry.revision) is int and type(entry.explicit) is bool):
            raise TypeError("wrong types")
        if not 0 < entry.revision < MAX_REVISION:
            raise TypeError("a revision that can't be")
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a desired model: {type(error).__name__}") from error
    return entry


def _wanted(fields: dict[str, Any]) -> WantedModel:
    wanted = WantedModel(**fields)
    texts = [*wanted.files, *wanted.files.values()]
    if type(wanted.load) is not bool or not (wanted.config is None or type(wanted.config) is str):
        raise TypeError("wrong types")
    if len(wanted.files) > MAX_FILES or not all(type(text) is str for text in texts):
        raise TypeError("wrong types")
    return wanted
