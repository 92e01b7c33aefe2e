"""What a worker replies to queries: readiness of models and contents of repositories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.contained_sites import fail_for
from weir.bus.naming import subjects
from weir.repository.layout import RepositorySnapshot
from weir.schemas.wire.model_control import ReadinessQuery, ReadinessReply, RepositoryView
from weir.worker import queries
from weir.worker.queries import QueryService

READINESS, INDEX = subjects.readiness_replies("gateway"), subjects.repository_replies("gateway")


class Worker:
    """A worker with version 1 of model `m`, whose probes reply with `replies`, and a repository with model `bad`."""

    def __init__(self, *replies: Callable[[], Awaitable[bool]]) -> None:
        self.bus = CollectingBus()
        self.problem = ""
        self.scans = 0
        probes = [SimpleNamespace(ask=reply) for reply in replies]
        health = SimpleNamespace(probes=lambda: probes, problem="")
        self.health = health
        served = SimpleNamespace(model=SimpleNamespace(health=health))
        models = cast(Any, {"m": SimpleNamespace(served={1: served})})
        repository = cast(Any, SimpleNamespace(snapshot=self._snapshot))
        self.service = QueryService(cast(Any, self.bus), "w", models, repository, self._unfetched)

    async def _unfetched(self) -> dict[str, str]:
        return {"remote": "not fetched"}

    def _snapshot(self) -> RepositorySnapshot:
        self.scans += 1
        return RepositorySnapshot(cast(Any, {"bad": SimpleNamespace(problem="no versions")}), {})

    async def ready(self, model: str = "m", version: int = 1) -> bool:
        """The reply to a readiness query."""
        async with asyncio.TaskGroup() as background:
            await self.service.start(background)
            self.bus.deliver(subjects.readiness("w"), ReadinessQuery(model, version).pack(), READINESS)
        (reply,) = self.bus.taken(READINESS)
        return ReadinessReply.unpack(reply).is_ready


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


async def fail() -> bool:
    raise RuntimeError("injected")


async def test_a_version_is_ready_if_every_available_instance_is() -> None:
    assert await Worker().ready()
    assert await Worker(yes, yes).ready()
    assert not await Worker(yes, no).ready()
    assert not await Worker().ready("other")
    assert not await Worker().ready("m", 2)


async def test_a_version_without_an_available_instance_is_not_ready() -> None:
    worker = Worker(yes)
    worker.health.problem = "the process was killed"
    assert not await worker.ready()


async def test_a_probe_that_raises_means_not_ready() -> None:
    assert not await Worker(fail).ready()


async def test_too_many_readiness_queries_are_answered_with_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_READINESS_QUERIES", 0)
    assert not await Worker(yes).ready()


async def test_malformed_queries_and_reserved_reply_subjects_are_ignored() -> None:
    worker = Worker(yes)
    async with asyncio.TaskGroup() as background:
        await worker.service.start(background)
        worker.bus.deliver(subjects.readiness("w"), b"nonsense", READINESS)
        worker.bus.deliver(subjects.readiness("w"), ReadinessQuery("m", 1).pack(), "done.s")
        worker.bus.deliver(subjects.REPOSITORY_QUERY, b"", "done.s")
    assert worker.bus.published == []
    assert worker.service.malformed_messages == 1


async def test_one_scan_serves_all_queries_that_came_before_it() -> None:
    worker = Worker()
    async with asyncio.TaskGroup() as background:
        await worker.service.start(background)
        for _ in range(3):
            worker.bus.deliver(subjects.REPOSITORY_QUERY, b"", INDEX)
    assert worker.scans == 1
    (reply,) = worker.bus.taken(INDEX)
    assert RepositoryView.unpack(reply) == RepositoryView("w", {"remote": "not fetched", "bad": "no versions"})


async def test_queries_are_served_again_after_a_scan_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    failures = iter([True, False])
    fail_for(monkeypatch, "weir.worker.queries:QueryService._reply_repository", lambda *_: next(failures))
    async with asyncio.TaskGroup() as background:
        await worker.service.start(background)
        worker.bus.deliver(subjects.REPOSITORY_QUERY, b"", INDEX)
        await asyncio.sleep(0)
        worker.bus.deliver(subjects.REPOSITORY_QUERY, b"", INDEX)
    assert len(worker.bus.taken(INDEX)) == 1
