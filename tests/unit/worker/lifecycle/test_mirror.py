"""Mirrors of repositories in NATS: a model that can't be fetched does not affect others."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from weir.bus.nats.connection import Bus
from weir.repository.layout import ModelRepository
from weir.schemas.core.errors import unavailable
from weir.schemas.wire.model_control import PushedFile, PushedModel
from weir.worker.lifecycle.mirror import RepositoryMirror, RepositoryMirrors
from weir.worker.lifecycle.mirror_folder import MirrorFolder

CONTENT = b"max_batch_size: 2"


class Pushed:
    """Pushed models of one file each; those in `broken` raise."""

    name = "shop"

    def __init__(self, *models: str) -> None:
        self._models = list(models)
        self.broken: dict[str, Exception] = {}

    async def names(self) -> list[str]:
        return self._models

    async def find(self, name: str) -> tuple[PushedModel, int] | None:
        if name in self.broken:
            raise self.broken[name]
        file = PushedFile("config.pbtxt", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
        return (PushedModel(name, (file,)), 1) if name in self._models else None

    async def pieces(self, file: PushedFile) -> AsyncIterator[bytes]:
        yield CONTENT


@pytest.mark.parametrize("error", [unavailable("it can't be read"), KeyError("digest"), RecursionError()])
async def test_a_model_that_can_not_be_fetched_does_not_affect_others(tmp_path: Path, error: Exception) -> None:
    pushed = Pushed("broken", "good")
    pushed.broken["broken"] = error
    folder = MirrorFolder(tmp_path)
    async with asyncio.TaskGroup() as background:
        mirrors = RepositoryMirrors([RepositoryMirror(cast(Bus, None), cast(Any, pushed), folder, background)])
        await mirrors.start(follows=False)
        assert list(ModelRepository([folder.models]).scan()) == ["good"]
        (problem,) = mirrors.problems().items()
        assert problem[0] == "broken"
        assert problem[1].startswith("failed to fetch it from repository 'shop': ")
        pushed.broken.clear()
        await mirrors.refresh("broken")
        assert mirrors.problems() == {}
        assert list(ModelRepository([folder.models]).scan()) == ["broken", "good"]
    folder.close()
