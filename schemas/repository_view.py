"""What a worker sees in its model repositories: the answer to a repository query."""

from __future__ import annotations

from typing import NamedTuple

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage


class RepositoryView(NamedTuple):
    """The models in the repositories of `worker`, loaded or not: by name, why one can't be served ("" for nothing)."""

    worker: str
    problems: dict[str, str]


def pack_repository_view(view: RepositoryView) -> bytes:
    """The view as a bus message."""
    return bytes(msgpack.packb([WIRE_VERSION, *view]))


def unpack_repository_view(data: bytes) -> RepositoryView:
    """The view in a message. Raises MalformedMessage."""
    try:
        version, worker, problems = msgpack.unpackb(data)
        if version != WIRE_VERSION or type(worker) is not str or type(problems) is not dict:
            raise TypeError("wrong types")
        if not all(type(name) is type(problem) is str for name, problem in problems.items()):
            raise TypeError("wrong types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a view of a repository: {type(error).__name__}") from error
    return RepositoryView(worker, problems)
