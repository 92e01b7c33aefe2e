"""`PushedModel`: what was pushed of a model into a repository that lies in NATS; a value of that repository's bucket."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage

MAX_PUSHED_FILES = 10_000
"""Files of one model."""

MAX_PATH_LENGTH = 1024

_DIGEST = re.compile(r"[0-9a-f]{64}")


class PushedFile(NamedTuple):
    """One file: its path in the model's folder, with `/`, its size, and the SHA-256 of its content in hexadecimal."""

    path: str
    size_bytes: int
    digest: str


class PushedModel(NamedTuple):
    """A model's folder."""

    name: str
    files: tuple[PushedFile, ...]


def is_inside(path: str) -> bool:
    """Whether `path` names a file inside of the folder it is relative to, and nothing that a file system may take amiss."""
    parts = path.split("/")
    return (
        0 < len(path) <= MAX_PATH_LENGTH
        and path.isprintable()
        and "\\" not in path
        and all(part not in ("", ".", "..") for part in parts)
    )


def pack_pushed(model: PushedModel) -> bytes:
    """The model as a value of the bucket."""
    return bytes(msgpack.packb([WIRE_VERSION, model.name, [list(file) for file in model.files]]))


def unpack_pushed(data: bytes) -> PushedModel:
    """The model in a value of the bucket. Raises MalformedMessage, also for a path that leads out of the model's folder."""
    try:
        version, name, rows = msgpack.unpackb(data)
        if version != WIRE_VERSION or type(name) is not str or len(rows) > MAX_PUSHED_FILES:
            raise TypeError("wrong types")
        files = tuple(PushedFile(*row) for row in rows)
        for file in files:
            if type(file.path) is not str or type(file.size_bytes) is not int or type(file.digest) is not str:
                raise TypeError("wrong types")
            if not is_inside(file.path) or file.size_bytes < 0 or not _DIGEST.fullmatch(file.digest):
                raise ValueError("a file that can't be")
        if len({file.path for file in files}) != len(files):
            raise ValueError("a path that is there twice")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a pushed model: {type(error).__name__}") from error
    return PushedModel(name, files)
