"""`RepositoryMirrors`: the repositories of a worker that lie in NATS, all together; with none of them it does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bus.connection import Bus
from schemas.errors import invalid
from schemas.repository_address import repository_of
from worker.mirror_folder import MirrorFolder
from worker.repository_mirror import RepositoryMirror
from worker.settings import WorkerSettings


class RepositoryMirrors:
    """See the module."""

    def __init__(self, mirrors: Sequence[RepositoryMirror] = ()) -> None:
        self._mirrors = mirrors

    async def start(self, follows: bool) -> None:
        """Fetches all models; with `follows`, also what is pushed from now on."""
        for mirror in self._mirrors:
            await mirror.start(follows)

    async def refresh(self, name: str) -> None:
        """Sees to it that the folders have the model as it was pushed last."""
        for mirror in self._mirrors:
            await mirror.refresh(name)

    def problems(self) -> dict[str, str]:
        """Why models can't be fetched, by model."""
        return {name: problem for mirror in self._mirrors for name, problem in mirror.problems.items()}

    def on_change(self, listener: Callable[[], Awaitable[None]]) -> None:
        """`listener()` is awaited after a folder has followed a change."""
        for mirror in self._mirrors:
            mirror.on_change = listener

    async def stop(self) -> None:
        """Follows no more."""
        for mirror in self._mirrors:
            await mirror.stop()

    def remove_folders(self) -> None:
        """Removes the models, once nothing runs from them any more."""
        for mirror in self._mirrors:
            mirror.remove_folder()


def open_mirrors(
    bus: Bus, settings: WorkerSettings, background: asyncio.TaskGroup
) -> tuple[list[Path], RepositoryMirrors]:
    """The folders of all repositories, in order, and what keeps those up to date that lie in NATS. Raises WeirError."""
    paths: list[Path] = []
    mirrors: list[RepositoryMirror] = []
    cache = None if settings.model_cache_dir is None else Path(settings.model_cache_dir)
    for place in settings.model_repositories:
        name = repository_of(place)
        if name is None:
            paths.append(Path(place))
            continue
        if settings.model_namespacing:
            raise invalid("--model-namespacing needs folders: a repository in NATS lies in another one for each worker")
        try:
            folder = MirrorFolder(cache)
        except OSError as error:
            raise invalid(f"there is no folder for the models of repository '{name}': {error.strerror}") from error
        mirrors.append(RepositoryMirror(bus, name, folder, background))
        paths.append(folder.models)
    return paths, RepositoryMirrors(mirrors)
